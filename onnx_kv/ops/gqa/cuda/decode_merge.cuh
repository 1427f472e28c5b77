// How decode's partial results become one: the warps of a block in shared memory, the blocks of a row in the workspace, always
// in the same order. Needs kHeads, kThreads and Place of the kernel.
#pragma once

#include "onnx_kv/ops/gqa/cuda/decode_plan.h"
#include "onnx_kv/ops/gqa/cuda/softmax.cuh"

constexpr int kItemsPerHead = HEAD_DIM / 4;  // a thread merges four elements
constexpr int kMergePitch = HEAD_DIM + 4;    // floats of a head's row while warps merge

// Where element `element` (even) of a head lies in its row, so that a warp's writes meet no bank twice.
__device__ __forceinline__ int MergeOffset(int head, int element) { return head * kMergePitch + (element ^ (head & 6)); }

// Four elements of one head's output (weighted values, relative to `maximum`), and the weights' sum.
struct Merging {
  float values[4] = {};
  float maximum = MinusInfinity();
  float sum = 0;

  __device__ __forceinline__ void AddScaled(float4 part, float factor) {
    values[0] = fmaf(part.x, factor, values[0]);
    values[1] = fmaf(part.y, factor, values[1]);
    values[2] = fmaf(part.z, factor, values[2]);
    values[3] = fmaf(part.w, factor, values[3]);
  }

  // Adds results with their maxima and sums; one of maximum -inf and sum 0 adds nothing.
  template <int kCount>
  __device__ __forceinline__ void Add(const float4 (&parts)[kCount], const float2 (&stats)[kCount]) {
    const float old = maximum;
#pragma unroll
    for (int i = 0; i < kCount; ++i) maximum = fmaxf(maximum, stats[i].x);
    const float base = FiniteBase(maximum), kept = Exp2(old - base);
    sum *= kept;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= kept;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float factor = Exp2(stats[i].x - base);
      sum = fmaf(stats[i].y, factor, sum);
      AddScaled(parts[i], factor);
    }
  }
};

// Writes an item of the output.
__device__ __forceinline__ void Finish(const onnx_kv::GqaParams& p, const Place& place, int item, const Merging& merging) {
  const int head = place.first_head + item / kItemsPerHead;
  const float factor = OutputFactor(p, head, merging.maximum, merging.sum);
  Element* target = static_cast<Element*>(p.output) +
                    (static_cast<int64_t>(place.row) * p.q_heads + head) * HEAD_DIM + item % kItemsPerHead * 4;
  const float(&v)[4] = merging.values;
#if DTYPE == 0
  *reinterpret_cast<float4*>(target) = float4{v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor};
#else
  *reinterpret_cast<uint2*>(target) = uint2{Pack(v[0] * factor, v[1] * factor), Pack(v[2] * factor, v[3] * factor)};
#endif
}

// What a block's warps leave in shared memory: outputs by MergeOffset, maxima and sums.
struct WarpResults {
  float2 stats[WARPS][kHeads];

  // An item, merged over the warps.
  __device__ __forceinline__ Merging Merge(const float* outputs, int item) const {
    const int head = item / kItemsPerHead;
    const float* row = outputs + MergeOffset(head, item % kItemsPerHead * 4) / 4 * 4;
    Merging merging;
    float2 own[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      own[warp] = stats[warp][head];
      merging.maximum = fmaxf(merging.maximum, own[warp].x);
    }
    const float base = FiniteBase(merging.maximum);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float factor = Exp2(own[warp].x - base);
      merging.sum = fmaf(own[warp].y, factor, merging.sum);
      const float4 part = *reinterpret_cast<const float4*>(row + warp * kHeads * kMergePitch);
      merging.AddScaled(head & 2 ? float4{part.z, part.w, part.x, part.y} : part, factor);
    }
    return merging;
  }
};

// Where the splits of a row leave their results: values [split][kHeads * HEAD_DIM], then statistics [split][kHeads][2].
struct Exchange {
  static constexpr int kValues = kHeads * HEAD_DIM;
  static constexpr int kBatch = 8;  // splits whose loads are under way together

  float* values;
  float* stats;

  __device__ __forceinline__ Exchange(float* workspace, int place)
      : values(workspace + static_cast<int64_t>(place) * gridDim.x * onnx_kv::SplitFloats(kHeads, HEAD_DIM)),
        stats(values + static_cast<int64_t>(gridDim.x) * kValues) {}

  __device__ __forceinline__ void Store(int split, int item, const Merging& m) const {
    const float(&v)[4] = m.values;
    *reinterpret_cast<float4*>(values + split * kValues + item * 4) = float4{v[0], v[1], v[2], v[3]};
    if (item % kItemsPerHead == 0) {
      *reinterpret_cast<float2*>(stats + (split * kHeads + item / kItemsPerHead) * 2) = float2{m.maximum, m.sum};
    }
  }

  // An item, merged over splits `first`, `first + step`, …
  __device__ __forceinline__ Merging Merge(int item, int first, int step, int splits) const {
    const float* value = values + first * kValues + item * 4;
    const float* stat = stats + (first * kHeads + item / kItemsPerHead) * 2;
    Merging merging;
    for (; first < splits; first += kBatch * step) {
      float4 parts[kBatch] = {};
      float2 own[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool exists = first + i * step < splits;
        own[i] = {MinusInfinity(), 0};
        LoadFresh(parts[i], value, exists);
        LoadFresh(own[i], stat, exists);
        value += step * kValues;
        stat += step * kHeads * 2;
      }
      merging.Add(parts, own);
    }
    return merging;
  }
};

// Merges a row's splits into the output. Several threads share an item's splits, where there are enough of them; `shared` has
// room for a Merging a thread.
__device__ __forceinline__ void MergeSplits(const onnx_kv::GqaParams& p, const Place& place, const Exchange& exchange,
                                            int splits, Merging* shared) {
  const int items = place.heads * kItemsPerHead, wide = min(items, kThreads), sharers = kThreads / wide;
  const int part = threadIdx.x / wide;  // threads of parts from `sharers` on are left over
  for (int item = threadIdx.x % wide; item < items; item += kThreads) {
    Merging merging;
    if (part < sharers) merging = exchange.Merge(item, part, sharers, splits);
    if (sharers > 1) {
      shared[threadIdx.x] = merging;
      __syncthreads();
      for (int other = 1; other < sharers && part == 0; ++other) {
        const Merging& m = shared[threadIdx.x + other * wide];
        merging.Add({float4{m.values[0], m.values[1], m.values[2], m.values[3]}}, {float2{m.maximum, m.sum}});
      }
    }
    if (part == 0) Finish(p, place, item, merging);
  }
}
