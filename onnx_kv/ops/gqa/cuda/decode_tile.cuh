// A warp's arithmetic in decode: a tile of cached tokens against up to 8 query heads at a time, transposed, so that the
// tokens (scores) and the head's elements (output) fill the 16 rows of the tensor cores' product and the heads its 8
// columns.
//
// Scores and output have the same shape a lane: of a 16x8 block, lane (r, c) = (lane / 4, lane % 4) holds rows r
// (elements 0, 1) and r + 8 (elements 2, 3), columns 2c (elements 0, 2) and 2c + 1 (elements 1, 3).
#pragma once

#include "onnx_kv/ops/cuda/instructions.cuh"

constexpr int kSteps = (HEAD_DIM + 15) / 16;  // blocks of 16 elements that cover a head

// Rows of K, V and the queries in shared memory: padded with zeros to whole blocks, and to an odd number of 16-byte
// units, so that 8 rows lie in different banks.
constexpr int kRowChunks = HEAD_DIM / kChunkElements;
constexpr int kPaddedChunks = kSteps * 16 / kChunkElements;
constexpr int kRowPitch = (kPaddedChunks | 1) * 16;

#if DTYPE != 0

// scores[16 tokens x 8 heads] = keys · queriesᵀ. `keys` and `queries` are shared addresses of their first row.
__device__ __forceinline__ void Scores(float (&scores)[4], uint32_t keys, uint32_t queries, int lane) {
  float odd[4] = {};
  uint32_t q[4];
  const uint32_t key_row = keys + (lane % 16) * kRowPitch + lane / 16 * 16;
  const uint32_t query_row = queries + (lane % 8) * kRowPitch + lane / 8 * 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t k[4];
    LoadMatrices(k, key_row + step * 32);
    if (step % 2 == 0) {  // four matrices: two steps' columns
      LoadMatrices(q, query_row + (step + 1 < kSteps ? step * 32 : step * 32 - (lane >= 16 ? 32 : 0)));
      MultiplyAdd(scores, k, q[0], q[1]);
    } else {
      MultiplyAdd(odd, k, q[2], q[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] += odd[i];
}

// output[HEAD_DIM x 8 heads] += valuesᵀ[HEAD_DIM x 16 tokens] · weights[16 tokens x 8 heads].
__device__ __forceinline__ void Accumulate(float (&output)[kSteps][4], const float (&weights)[4], uint32_t values,
                                           int lane) {
  const uint32_t b0 = Transpose(Pack(weights[0], weights[1])), b1 = Transpose(Pack(weights[2], weights[3]));
  const uint32_t row = values + (lane % 8 + lane / 16 * 8) * kRowPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t v[4];
    LoadMatricesTransposed(v, row + step * 32);
    MultiplyAdd(output[step], v, b0, b1);
  }
}

#else  // float: the same blocks by fused multiply-adds

__device__ __forceinline__ float Dot(uint4 a, uint4 b, float sum) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = fmaf(ElementOf(a, i), ElementOf(b, i), sum);
  return sum;
}

__device__ __forceinline__ void Scores(float (&scores)[4], uint32_t keys, uint32_t queries, int lane) {
  const uint32_t key_row = keys + lane / 4 * kRowPitch, query_row = queries + lane % 4 * 2 * kRowPitch;
  for (int chunk = 0; chunk < kRowChunks; ++chunk) {
    const uint4 k0 = LoadShared(key_row + chunk * 16), k1 = LoadShared(key_row + 8 * kRowPitch + chunk * 16);
    const uint4 q0 = LoadShared(query_row + chunk * 16), q1 = LoadShared(query_row + kRowPitch + chunk * 16);
    scores[0] = Dot(k0, q0, scores[0]);
    scores[1] = Dot(k0, q1, scores[1]);
    scores[2] = Dot(k1, q0, scores[2]);
    scores[3] = Dot(k1, q1, scores[3]);
  }
}

__device__ __forceinline__ float LoadSharedFloat(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ void Accumulate(float (&output)[kSteps][4], const float (&weights)[4], uint32_t values,
                                           int lane) {
#pragma unroll
  for (int token = 0; token < 16; ++token) {
    const int holder = token % 8 * 4 + lane % 4, part = token / 8 * 2;
    const float w0 = __shfl_sync(kFullWarp, weights[part], holder);
    const float w1 = __shfl_sync(kFullWarp, weights[part + 1], holder);
    const uint32_t row = values + token * kRowPitch + lane / 4 * 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float v0 = LoadSharedFloat(row + step * 64), v1 = LoadSharedFloat(row + step * 64 + 32);
      output[step][0] = fmaf(v0, w0, output[step][0]);
      output[step][1] = fmaf(v0, w1, output[step][1]);
      output[step][2] = fmaf(v1, w0, output[step][2]);
      output[step][3] = fmaf(v1, w1, output[step][3]);
    }
  }
}

#endif
