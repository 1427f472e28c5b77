// Prefill's two small kernels: write a call's new tokens into the cache, and carry a past of its own into the present.
// Specialised by DTYPE, HEAD_DIM.

#include "onnx_kv/ops/gqa/cuda/head_vector.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowChunks = HEAD_DIM / kChunkElements;

}  // namespace

// grid (q_len * kv_heads / kWarps, batch): a warp normalises, rotates and appends one head's K, and copies its V.
extern "C" __global__ void __launch_bounds__(kThreads) gqa_append(const __grid_constant__ onnx_kv::GqaParams p) {
  WaitForPreviousKernel();
  const int lane = threadIdx.x % 32, row = blockIdx.y;
  const int item = blockIdx.x * kWarps + threadIdx.x / 32;
  const int index = item / p.kv_heads, kv_head = item % p.kv_heads;
  const RowLengths lengths = ReadLengths(p, row);
  if (index >= lengths.fresh) return;
  const int64_t source = (static_cast<int64_t>(row) * p.q_len + index) * p.kv_token_stride + kv_head * HEAD_DIM;
  const int64_t target = (lengths.past + index) * p.present.seq;

  const RotaryPairs pairs(p, RotaryPosition(p, row, index, lengths.past), lane);
  HeadVector key;
  key.Load(static_cast<const Element*>(p.key) + source, pairs, lane);
  key.Normalise(p.k_norm_weight, p.k_norm_epsilon, pairs, lane);
  key.Store(CacheRow(p.present_key, p.present, row, kv_head) + target, pairs, lane);

  const uint4* value = reinterpret_cast<const uint4*>(static_cast<const Element*>(p.value) + source);
  uint4* place = reinterpret_cast<uint4*>(CacheRow(p.present_value, p.present, row, kv_head) + target);
  for (int chunk = lane; chunk < kRowChunks; chunk += 32) place[chunk] = value[chunk];
}

// grid (any, kv_heads, batch): copies the live prefix of a row's head from past to present.
extern "C" __global__ void __launch_bounds__(kThreads) gqa_copy_prefix(const __grid_constant__ onnx_kv::GqaParams p) {
  WaitForPreviousKernel();
  const int kv_head = blockIdx.y, row = blockIdx.z;
  const int past = ReadLengths(p, row).past;
  const Element* const sources[2] = {CacheRow(const_cast<void*>(p.past_key), p.past, row, kv_head),
                                     CacheRow(const_cast<void*>(p.past_value), p.past, row, kv_head)};
  Element* const targets[2] = {CacheRow(p.present_key, p.present, row, kv_head),
                               CacheRow(p.present_value, p.present, row, kv_head)};
  const int64_t chunks = static_cast<int64_t>(past) * kRowChunks;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < chunks; i += gridDim.x * kThreads) {
    const int64_t token = i / kRowChunks, element = i % kRowChunks * kChunkElements;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      *reinterpret_cast<uint4*>(targets[side] + token * p.present.seq + element) =
          *reinterpret_cast<const uint4*>(sources[side] + token * p.past.seq + element);
    }
  }
}
