// One call of GroupQueryAttention, as plain data: what the operator has checked and a kernel needs.
//
// CPU kernels get host pointers, CUDA kernels device pointers. Sizes are in elements and 64-bit wherever an address
// comes of them: a cache of 2^31 elements is ordinary.
#pragma once

#include <cstdint>

namespace onnx_kv {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// The same numbers as onnx_kv/layout.py: the kv_layout attribute.
enum class KvLayout : int32_t { kHeadMajor = 0, kSeqMajor = 1, kPaired = 2, kTokenMajor = 3 };

// Element (b, h, s, d) of a cache binding lies at b*batch + h*head + s*seq + d. Elements, not bytes.
struct KvStrides {
  int64_t batch;
  int64_t head;
  int64_t seq;
};

// The only native place that knows the layouts. `token_stride` is the node's kv_token_stride attribute, used by the
// interleaved layouts (paired, token-major) alone.
inline KvStrides StridesOf(KvLayout layout, int64_t kv_heads, int64_t head_dim, int64_t capacity, int64_t token_stride) {
  if (layout == KvLayout::kHeadMajor) return {kv_heads * capacity * head_dim, capacity * head_dim, head_dim};
  const int64_t token = layout == KvLayout::kSeqMajor ? kv_heads * head_dim : token_stride;
  return {capacity * token, head_dim, token};
}

// Lengths. T = seqlens_k[b] + 1 tokens are in row b's cache after the call, Q = query_seqlens[b], or min(q_len, T)
// without that input, of them are new, P = T - Q were there before. Query row s (of Q) is at absolute position P + s.
// CUDA kernels read them on the device, so that a captured graph is right for every length.
struct GqaParams {
  DType dtype;
  int32_t batch;
  int32_t q_len;  // tokens a row in this call, padding included
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t past_capacity;     // axis 2 of past_key; 0 without a past
  int32_t present_capacity;  // axis 2 of present_key

  // New tokens: element (b, s, h, d) at b*q_len*token + s*token + h*head_dim + d. Packed QKV shares one token stride.
  const void* query;
  const void* key;
  const void* value;
  int64_t query_token_stride;
  int64_t kv_token_stride;

  const void* past_key;  // nullptr without a past; equal to present_key where both are one buffer
  const void* past_value;
  void* present_key;
  void* present_value;
  KvStrides past;
  KvStrides present;

  const int32_t* seqlens_k;      // [batch], T - 1
  const int32_t* query_seqlens;  // [batch] or nullptr

  const void* cos_cache;  // [rotary_rows, rotary_dim / 2] or nullptr: no rotary embedding
  const void* sin_cache;
  int32_t rotary_rows;
  int32_t rotary_dim;  // width of the rotated part of a head; the rest is copied
  bool rotary_interleaved;
  const int64_t* position_ids;  // [batch, q_len] or nullptr: positions follow from the lengths

  // (b, h, s, t) at b*bias_batch + h*bias_head + s*bias_row + t, or nullptr; t is the key's absolute position. A bias of
  // -65504 (float16's lowest) or less is a mask: weight 0, even in a row where nothing else is left.
  const void* attention_bias;
  int64_t bias_batch_stride;   // 0 broadcasts
  int64_t bias_head_stride;
  int64_t bias_row_stride;

  const void* head_sink;  // [q_heads] or nullptr
  const void* q_norm_weight;  // [head_dim] or nullptr: RMS norm of every query head before the rotary embedding
  const void* k_norm_weight;
  float q_norm_epsilon;
  float k_norm_epsilon;

  float scale;    // of q·k, before softcap
  float softcap;  // 0: none
  int32_t window;  // local_window_size: a query sees itself and window-1 tokens before it; <= 0: all
  bool smooth_softmax;  // adds exp(0) to the denominator (head_sink: exp(sink[h]))

  void* output;  // [batch, q_len, q_heads * head_dim]
};

}  // namespace onnx_kv
