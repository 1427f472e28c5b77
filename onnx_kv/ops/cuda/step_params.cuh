// What the step kernel is launched with; included by the kernel and by the host. Pointers are device pointers.
#pragma once

#ifndef __CUDACC_RTC__  // NVRTC has no standard headers; element.cuh stands in for them there
#include <cstdint>
#endif

namespace onnx_kv::cuda {

constexpr int kStepThreads = 1024;

// Chosen where a row's logits have a NaN or +inf, or nothing but -inf: no token.
constexpr int64_t kNoToken = -1;

// The rows' inputs of the next step. `ring` keeps the last `ring_size` tokens of every row for the host to read; it and
// `live` may be host memory that the device reaches.
struct StepState {
  int64_t* input_ids;       // [batch]: the token that the next step reads
  int64_t* position_ids;    // [batch] or null
  int32_t* seqlens_k;       // [batch]: tokens in the cache after the next step, minus one; so the next token's place
  int64_t* attention_mask;  // [batch, mask_stride] or null
  int64_t mask_stride;      // slots a row
  int64_t* ring;            // [batch, ring_size]
  int32_t ring_size;
  int32_t* steps;  // [batch]: tokens chosen so far; the sampler's counter and the ring's index
  const int32_t* live;  // [batch] or null: a row with 0 stays as it is
};

struct Sampling {
  float temperature;  // <= 0: greedy
  int32_t top_k;      // <= 0: every token
  float top_p;        // >= 1: every token
  uint64_t seed;
};

}  // namespace onnx_kv::cuda
