// A warp's arithmetic in prefill: 16 rows of queries against COLUMNS cached tokens. Of a 16x8 block, lane
// (r, c) = (lane / 4, lane % 4) holds rows r (elements 0, 1) and r + 8 (elements 2, 3), columns 2c and 2c + 1.
#pragma once

#include "onnx_kv/ops/cuda/instructions.cuh"

constexpr int kSteps = (HEAD_DIM + 15) / 16;  // blocks of 16 elements that cover a head
constexpr int kColumnBlocks = COLUMNS / 8;
constexpr int kOutputBlocks = 2 * kSteps;

// Rows in shared memory: padded with zeros to whole blocks, and to an odd number of 16-byte units, so that 8 rows lie in
// different banks.
constexpr int kRowChunks = HEAD_DIM / kChunkElements;
constexpr int kPaddedChunks = kSteps * 16 / kChunkElements;
constexpr int kRowPitch = (kPaddedChunks | 1) * 16;

using ScoreBlocks = float[kColumnBlocks][4];
using OutputBlocks = float[kOutputBlocks][4];

#if DTYPE != 0

// scores[BLOCKS x 16 x COLUMNS] = queries · keysᵀ, for BLOCKS blocks of 16 rows that share every read of K.
template <int BLOCKS>
__device__ __forceinline__ void Scores(ScoreBlocks (&scores)[BLOCKS], uint32_t queries, uint32_t keys, int lane) {
  const uint32_t query_row = queries + lane % 16 * kRowPitch + lane / 16 * 16;
  const uint32_t key_row = keys + (lane % 8 + lane / 16 * 8) * kRowPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t q[BLOCKS][4];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) LoadMatrices(q[block], query_row + block * 16 * kRowPitch + step * 32);
#pragma unroll
    for (int column = 0; column < kColumnBlocks; column += 2) {
      uint32_t k[4];
      LoadMatrices(k, key_row + column * 8 * kRowPitch + step * 32);
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        MultiplyAdd(scores[block][column], q[block], k[0], k[1]);
        MultiplyAdd(scores[block][column + 1], q[block], k[2], k[3]);
      }
    }
  }
}

// output[BLOCKS x 16 x HEAD_DIM] += weights · values.
template <int BLOCKS>
__device__ __forceinline__ void Accumulate(OutputBlocks (&output)[BLOCKS], const ScoreBlocks (&weights)[BLOCKS], uint32_t values,
                                           int lane) {
  const uint32_t row = values + lane % 16 * kRowPitch + lane / 16 * 16;
#pragma unroll
  for (int column = 0; column < kColumnBlocks; column += 2) {
    uint32_t w[BLOCKS][4];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &weights[block][column + i / 2][i % 2 * 2];
        w[block][i] = Pack(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t v[4];
      LoadMatricesTransposed(v, row + column * 8 * kRowPitch + step * 32);
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        MultiplyAdd(output[block][2 * step], w[block], v[0], v[1]);
        MultiplyAdd(output[block][2 * step + 1], w[block], v[2], v[3]);
      }
    }
  }
}

#else  // float: the same blocks by fused multiply-adds

__device__ __forceinline__ float Dot(uint4 a, uint4 b, float sum) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(ElementOf(a, i), ElementOf(b, i), sum);
  return sum;
}

template <int BLOCKS>
__device__ __forceinline__ void Scores(ScoreBlocks (&scores)[BLOCKS], uint32_t queries, uint32_t keys, int lane) {
  static_assert(BLOCKS == 1);
  const uint32_t query_row = queries + lane / 4 * kRowPitch, key_row = keys + lane % 4 * 2 * kRowPitch;
  for (int chunk = 0; chunk < kRowChunks; ++chunk) {
    const uint4 q0 = LoadShared(query_row + chunk * 16), q1 = LoadShared(query_row + 8 * kRowPitch + chunk * 16);
#pragma unroll
    for (int column = 0; column < kColumnBlocks; ++column) {
      const uint32_t place = key_row + column * 8 * kRowPitch + chunk * 16;
      const uint4 k0 = LoadShared(place), k1 = LoadShared(place + kRowPitch);
      float(&block)[4] = scores[0][column];
      block[0] = Dot(q0, k0, block[0]);
      block[1] = Dot(q0, k1, block[1]);
      block[2] = Dot(q1, k0, block[2]);
      block[3] = Dot(q1, k1, block[3]);
    }
  }
}

__device__ __forceinline__ float2 LoadSharedPair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}

template <int BLOCKS>
__device__ __forceinline__ void Accumulate(OutputBlocks (&output)[BLOCKS], const ScoreBlocks (&weights)[BLOCKS], uint32_t values,
                                           int lane) {
#pragma unroll
  for (int column = 0; column < kColumnBlocks; ++column) {
#pragma unroll
    for (int token = 0; token < 8; ++token) {
      const int holder = lane / 4 * 4 + token / 2;
      const float w0 = __shfl_sync(kFullWarp, weights[0][column][token % 2], holder);
      const float w1 = __shfl_sync(kFullWarp, weights[0][column][token % 2 + 2], holder);
      const uint32_t row = values + (column * 8 + token) * kRowPitch + lane % 4 * 8;
#pragma unroll
      for (int block = 0; block < kOutputBlocks; ++block) {
        const float2 v = LoadSharedPair(row + block * 32);
        output[0][block][0] = fmaf(v.x, w0, output[0][block][0]);
        output[0][block][1] = fmaf(v.y, w0, output[0][block][1]);
        output[0][block][2] = fmaf(v.x, w1, output[0][block][2]);
        output[0][block][3] = fmaf(v.y, w1, output[0][block][3]);
      }
    }
  }
}

#endif
