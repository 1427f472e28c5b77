// One head's vector of a new token: RMS norm, rotary embedding, rounding. A warp handles a vector, a lane pairs of elements.
#pragma once

#include "onnx_kv/ops/gqa/cuda/rows.cuh"

constexpr int kLanePairs = (HEAD_DIM / 2 + 31) / 32;

// Which elements a lane's pairs are, and their angle's cosine and sine: the same for every head of a token.
struct RotaryPairs {
  int first[kLanePairs];
  int second[kLanePairs];
  float cosine[kLanePairs];
  float sine[kLanePairs];

  __device__ __forceinline__ RotaryPairs(const onnx_kv::GqaParams& p, int position, int lane) {
    const int rotated = p.cos_cache == nullptr ? 0 : p.rotary_dim / 2;
    const int64_t angles = static_cast<int64_t>(position) * rotated;
#pragma unroll
    for (int j = 0; j < kLanePairs; ++j) {
      const int pair = lane + 32 * j;
      const bool turns = pair < rotated;
      const bool neighbours = !turns || p.rotary_interleaved;
      first[j] = neighbours ? 2 * pair : pair;
      second[j] = neighbours ? 2 * pair + 1 : pair + rotated;
      cosine[j] = turns ? ToFloat(static_cast<const Element*>(p.cos_cache)[angles + pair]) : 1.0f;
      sine[j] = turns ? ToFloat(static_cast<const Element*>(p.sin_cache)[angles + pair]) : 0.0f;
    }
  }
};

__device__ __forceinline__ bool HasPair(int lane, int j) { return lane + 32 * j < HEAD_DIM / 2; }

struct HeadVector {
  float first[kLanePairs];
  float second[kLanePairs];

  __device__ __forceinline__ void Load(const Element* source, const RotaryPairs& pairs, int lane) {
#pragma unroll
    for (int j = 0; j < kLanePairs; ++j) {
      first[j] = HasPair(lane, j) ? ToFloat(source[pairs.first[j]]) : 0.0f;
      second[j] = HasPair(lane, j) ? ToFloat(source[pairs.second[j]]) : 0.0f;
    }
  }

  // x · weight / sqrt(mean(x²) + epsilon); nothing without a weight.
  __device__ __forceinline__ void Normalise(const void* weight, float epsilon, const RotaryPairs& pairs, int lane) {
    if (weight == nullptr) return;
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kLanePairs; ++j) squares += first[j] * first[j] + second[j] * second[j];
    const float factor = 1.0f / sqrtf(SumOverLanes(squares, 1) / HEAD_DIM + epsilon);
#pragma unroll
    for (int j = 0; j < kLanePairs; ++j) {
      if (!HasPair(lane, j)) continue;
      first[j] *= factor * ToFloat(static_cast<const Element*>(weight)[pairs.first[j]]);
      second[j] *= factor * ToFloat(static_cast<const Element*>(weight)[pairs.second[j]]);
    }
  }

  // Writes the rotated vector.
  __device__ __forceinline__ void Store(Element* target, const RotaryPairs& pairs, int lane) const {
#pragma unroll
    for (int j = 0; j < kLanePairs; ++j) {
      if (!HasPair(lane, j)) continue;
      target[pairs.first[j]] = FromFloat(first[j] * pairs.cosine[j] - second[j] * pairs.sine[j]);
      target[pairs.second[j]] = FromFloat(second[j] * pairs.cosine[j] + first[j] * pairs.sine[j]);
    }
  }
};
