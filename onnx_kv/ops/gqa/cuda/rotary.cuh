// The rotary embedding and the RMS norm of a new token's heads, in pairs of elements.
#pragma once

#include "onnx_kv/ops/gqa/cuda/rows.cuh"

constexpr int kHeadPairs = HEAD_DIM / 2;

// Which elements of a head its pair `index` is, and its angle at a position. What is not rotated has angle zero.
class RotaryPair {
 public:
  __device__ __forceinline__ RotaryPair(const onnx_kv::GqaParams& p, int index) : index_(index) {
    const int rotated = p.cos_cache == nullptr ? 0 : p.rotary_dim / 2;
    const bool neighbours = index >= rotated || p.rotary_interleaved;
    first_ = neighbours ? 2 * index : index;
    second_ = neighbours ? 2 * index + 1 : index + rotated;
  }

  __device__ __forceinline__ void Turn(const onnx_kv::GqaParams& p, int position) {
    const int rotated = p.cos_cache == nullptr ? 0 : p.rotary_dim / 2;
    if (index_ >= rotated) return;
    const int64_t angle = static_cast<int64_t>(position) * rotated + index_;
    cosine_ = ToFloat(static_cast<const Element*>(p.cos_cache)[angle]);
    sine_ = ToFloat(static_cast<const Element*>(p.sin_cache)[angle]);
  }

  __device__ __forceinline__ float2 Load(const Element* head) const {
    return {ToFloat(head[first_]), ToFloat(head[second_])};
  }

  __device__ __forceinline__ void Scale(float2& pair, float factor, const Element* weight) const {
    pair.x *= factor * ToFloat(weight[first_]);
    pair.y *= factor * ToFloat(weight[second_]);
  }

  __device__ __forceinline__ float2 Rotate(float2 pair) const {
    return {pair.x * cosine_ - pair.y * sine_, pair.y * cosine_ + pair.x * sine_};
  }

  __device__ __forceinline__ void Store(Element* head, float2 pair) const {
    head[first_] = FromFloat(pair.x);
    head[second_] = FromFloat(pair.y);
  }

 private:
  int index_;
  int first_;
  int second_;
  float cosine_ = 1;
  float sine_ = 0;
};

// What the RMS norm multiplies a head by, besides the weight. Computed by a warp.
__device__ __forceinline__ float NormFactor(const Element* head, float epsilon) {
  float squares = 0;
  for (int i = threadIdx.x % 32; i < HEAD_DIM; i += 32) {
    const float x = ToFloat(head[i]);
    squares += x * x;
  }
  return 1.0f / sqrtf(SumOverLanes(squares, 1) / HEAD_DIM + epsilon);
}
