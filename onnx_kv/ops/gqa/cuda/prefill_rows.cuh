// Rows of queries in prefill: which they are, how they are prepared, weighed, masked and written. A warp has blocks of 16 rows,
// a lane of them what prefill_tile.cuh says. The kernel defines kRows, a block's rows, and kWarpRows, a warp's.
#pragma once

#include "onnx_kv/ops/gqa/cuda/head_vector.cuh"
#include "onnx_kv/ops/gqa/cuda/prefill_tile.cuh"
#include "onnx_kv/ops/gqa/cuda/softmax.cuh"

// What a block works on. Query row i is new token i / group, head i % group of the KV head's group.
struct Place {
  int row;
  int kv_head;
  int group;
  int first_row;  // of the block's queries
  RowLengths lengths;

  __device__ __forceinline__ explicit Place(const onnx_kv::GqaParams& p)
      : row(blockIdx.z),
        kv_head(blockIdx.x),
        group(p.q_heads / p.kv_heads),
        first_row((gridDim.y - 1 - blockIdx.y) * kRows),  // the longest work first
        lengths(ReadLengths(p, row)) {}

  __device__ __forceinline__ int Token(int i) const { return (first_row + i) / group; }
  __device__ __forceinline__ int Head(int i) const { return kv_head * group + (first_row + i) % group; }
  // Where the cache's tokens begin and end for query row i.
  __device__ __forceinline__ int End(int i) const { return lengths.past + min(Token(i), lengths.fresh - 1) + 1; }
  __device__ __forceinline__ int Begin(const onnx_kv::GqaParams& p, int i) const {
    return p.window > 0 ? max(0, lengths.past + Token(i) + 1 - p.window) : 0;
  }
};

// This warp's queries, normalised and rotated, into shared memory; zeros where there is none.
__device__ __forceinline__ void PrepareQueries(const onnx_kv::GqaParams& p, const Place& place, unsigned char* queries) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 8
  for (int i = warp * kWarpRows; i < (warp + 1) * kWarpRows; ++i) {
    Element* target = reinterpret_cast<Element*>(queries + i * kRowPitch);
    const int token = place.Token(i);
    if (token >= place.lengths.fresh) {
      for (int chunk = lane; chunk < kPaddedChunks; chunk += 32) reinterpret_cast<uint4*>(target)[chunk] = uint4{};
      continue;
    }
    const Element* source = static_cast<const Element*>(p.query) +
                            (static_cast<int64_t>(place.row) * p.q_len + token) * p.query_token_stride +
                            place.Head(i) * HEAD_DIM;
    const RotaryPairs pairs(p, RotaryPosition(p, place.row, token, place.lengths.past), lane);
    HeadVector vector;
    vector.Load(source, pairs, lane);
    vector.Normalise(p.q_norm_weight, p.q_norm_epsilon, pairs, lane);
    vector.Store(target, pairs, lane);
    if (HEAD_DIM % 16 != 0 && lane < kPaddedChunks - kRowChunks) {
      reinterpret_cast<uint4*>(target)[kRowChunks + lane] = uint4{};
    }
  }
}

__device__ __forceinline__ void StorePair(Element* target, float low, float high) {
#if DTYPE == 0
  *reinterpret_cast<float2*>(target) = {low, high};
#else
  *reinterpret_cast<uint32_t*>(target) = Pack(low, high);
#endif
}

// Online softmax of this lane's two rows in each block of 16.
struct RowState {
  float maximum[2];
  float sum[2];

  __device__ __forceinline__ RowState() : maximum{MinusInfinity(), MinusInfinity()}, sum{0, 0} {}

  // Scores become weights; `unit` turns a score into log2 units. What was summed before counts `factors` times from now on.
  __device__ __forceinline__ void Weigh(ScoreBlocks& scores, float unit, float (&factors)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = MinusInfinity();
#pragma unroll
      for (int column = 0; column < kColumnBlocks; ++column) {
        highest = fmaxf(highest, fmaxf(scores[column][2 * half], scores[column][2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      highest = fmaxf(maximum[half], highest * unit);
      const float base = FiniteBase(highest);
      factors[half] = Exp2(maximum[half] - base);
      maximum[half] = highest;
      sum[half] *= factors[half];
#pragma unroll
      for (int column = 0; column < kColumnBlocks; ++column) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[column][i] = Exp2(fmaf(scores[column][i], unit, -base));
          sum[half] += scores[column][i];
        }
      }
    }
  }
};

// Most tiles hold no new maximum for any of a warp's rows.
__device__ __forceinline__ void Rescale(OutputBlocks& output, const float (&factors)[2]) {
  if (__all_sync(kFullWarp, factors[0] == 1.0f && factors[1] == 1.0f)) return;
#pragma unroll
  for (int block = 0; block < kOutputBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) output[block][i] *= factors[i / 2];
  }
}

// What scores need beyond a factor is known before the loop: without a softcap and a bias it waits for the exponential.
struct ScoreRule {
  ScoreScale scale;
  bool plain;
  float unit;  // of scores after Adjust, in log2 units

  __device__ __forceinline__ explicit ScoreRule(const onnx_kv::GqaParams& p)
      : scale(p),
        plain(p.softcap <= 0 && p.attention_bias == nullptr && scale.factor > 0),
        unit(plain ? scale.factor : 1.0f) {}
};

// Which tokens this lane's two rows of the block of 16 that begins at `first` see, and which all 16 see.
struct RowBounds {
  int begin[2];
  int end[2];
  int common_begin;
  int common_end;

  __device__ __forceinline__ RowBounds(const onnx_kv::GqaParams& p, const Place& place, int first)
      : common_begin(place.Begin(p, first + 15)), common_end(place.End(first)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first + threadIdx.x % 32 / 4 + half * 8;
      begin[half] = place.Begin(p, i);
      end[half] = place.End(i);
    }
  }
};

// Scales, biases and masks the scores of a block of 16 rows with the tile that begins at `token`.
__device__ __forceinline__ void Adjust(const onnx_kv::GqaParams& p, const Place& place, const ScoreRule& rule,
                                       const RowBounds& bounds, int first, int token, ScoreBlocks& scores) {
  const int lane = threadIdx.x % 32;
  if (!rule.plain) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first + lane / 4 + half * 8;
      const bool exists = place.Token(i) < place.lengths.fresh;
      const Element* bias = exists ? BiasRow(p, place.row, place.Head(i), place.Token(i)) : nullptr;
#pragma unroll
      for (int j = 0; j < 2 * kColumnBlocks; ++j) {
        const int at = token + j / 2 * 8 + lane % 4 * 2 + j % 2;
        float& score = scores[j / 2][half * 2 + j % 2];
        score = rule.scale(score);
        if (bias != nullptr && at < bounds.end[half]) score = AddBias(score, bias[at]);
      }
    }
  }
  if (token >= bounds.common_begin && token + COLUMNS <= bounds.common_end) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 2 * kColumnBlocks; ++j) {
      const int at = token + j / 2 * 8 + lane % 4 * 2 + j % 2;
      if (at < bounds.begin[half] || at >= bounds.end[half]) scores[j / 2][half * 2 + j % 2] = MinusInfinity();
    }
  }
}

// Writes a block of 16 rows of output; padding rows are zero.
__device__ __forceinline__ void StoreRows(const onnx_kv::GqaParams& p, const Place& place, int first, const RowState& state,
                                          const OutputBlocks& output) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = first + lane / 4 + half * 8, token = place.Token(i);
    float sum = state.sum[half];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (token >= p.q_len) continue;
    const float factor =
        token < place.lengths.fresh ? OutputFactor(p, place.Head(i), state.maximum[half], sum) : 0.0f;
    Element* target = static_cast<Element*>(p.output) +
                      ((static_cast<int64_t>(place.row) * p.q_len + token) * p.q_heads + place.Head(i)) * HEAD_DIM;
#pragma unroll
    for (int block = 0; block < kOutputBlocks; ++block) {
      const int element = block * 8 + lane % 4 * 2;
      if (element >= HEAD_DIM) continue;
      const float low = factor == 0 ? 0.0f : output[block][half * 2] * factor;
      const float high = factor == 0 ? 0.0f : output[block][half * 2 + 1] * factor;
      StorePair(target + element, low, high);
    }
  }
}
