// Lengths of a batch row, read on the device, and how a row's tokens are split among blocks.
#pragma once

#include "onnx_kv/ops/cuda/instructions.cuh"
#include "onnx_kv/ops/gqa/params.h"

struct RowLengths {
  int total;  // T: tokens in the cache after this call
  int fresh;  // Q: those that this call adds
  int past;   // P: those that were there before
};

__device__ __forceinline__ int Clamp(int64_t value, int64_t low, int64_t high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

// Out-of-range lengths are clamped to what the buffers hold, so that no length makes a fault.
__device__ __forceinline__ RowLengths ReadLengths(const onnx_kv::GqaParams& p, int row) {
  const int total = Clamp(static_cast<int64_t>(p.seqlens_k[row]) + 1, 0, p.present_capacity);
  const int fresh = Clamp(p.query_seqlens == nullptr ? p.q_len : p.query_seqlens[row], 0, min(p.q_len, total));
  const int past = min(total - fresh, p.past_capacity);
  return {past + fresh, fresh, past};
}

// Position of new token `index` of `row` in the rotary tables.
__device__ __forceinline__ int RotaryPosition(const onnx_kv::GqaParams& p, int row, int index, int past) {
  const int64_t position =
      p.position_ids == nullptr ? past + index : p.position_ids[static_cast<int64_t>(row) * p.q_len + index];
  return Clamp(position, 0, p.rotary_rows - 1);
}

__device__ __forceinline__ Element* CacheRow(void* cache, const onnx_kv::KvStrides& strides, int row, int kv_head) {
  return static_cast<Element*>(cache) + row * strides.batch + kv_head * strides.head;
}
