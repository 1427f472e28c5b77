// A warp's arithmetic in decode: tiles of kTile cached tokens against 8 query heads at a time, on the tensor cores.
//
// Both products are transposed, so that tokens (of the scores) and elements (of the output) fill the 16 rows of an
// instruction and the heads its 8 columns. K and V go straight from global memory into the registers of that layout: the
// order in which a product sums over a head's elements is free, so a lane takes 16 bytes at a time. float32 is split into
// two tf32 halves, three products each, which keeps about 21 bits.
//
// Of a 16x8 block, lane (r, c) = (lane / 4, lane % 4) holds rows r (elements 0, 1) and r + 8 (elements 2, 3), columns 2c
// (elements 0, 2) and 2c + 1 (elements 1, 3).
#pragma once

#include "onnx_kv/ops/cuda/instructions.cuh"

constexpr int kTile = 16;  // tokens
constexpr int kRowChunks = HEAD_DIM / kChunkElements;
constexpr int kKeyBlocks = (kRowChunks + 3) / 4;           // of four chunks of K: one for each c
constexpr int kValueBlocks = (kRowChunks + 7) / 8;         // of eight chunks of V: one for each r
constexpr int kBlockTiles = kChunkElements / 2;            // 16-row blocks of the output that a block of V makes
constexpr int kOutputTiles = kValueBlocks * kBlockTiles;
constexpr int kQueryPitch = ((kRowChunks + 7) / 8 * 8 + 4) * 16;  // bytes: a quarter warp's reads hit all banks once

// Element of the head that row r (`half` 0) or r + 8 (`half` 1) of an output block is.
__device__ __forceinline__ int OutputElement(int tile, int half, int r) {
  return (tile / kBlockTiles * 8 + r) * kChunkElements + tile % kBlockTiles * 2 + half;
}

// Which of a tile's tokens a lane reads V of: the pairs (or singles) that the product's first operand wants.
__device__ __forceinline__ int ValueToken(int i, int c) {
#if DTYPE == 0
  return c + 4 * i;
#else
  return 2 * c + i % 2 + i / 2 * 8;
#endif
}

#if DTYPE == 0
// Three products of tf32 halves that together multiply floats.
__device__ __forceinline__ void MultiplyAddFloat(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto high = [](uint32_t bits) { return bits & 0xffffe000u; };
  auto low = [&](uint32_t bits) { return __float_as_uint(__uint_as_float(bits) - __uint_as_float(high(bits))); };
  const uint32_t a_high[4] = {high(a[0]), high(a[1]), high(a[2]), high(a[3])};
  MultiplyAddTf32(c, {low(a[0]), low(a[1]), low(a[2]), low(a[3])}, high(b0), high(b1));
  MultiplyAddTf32(c, a_high, low(b0), low(b1));
  MultiplyAddTf32(c, a_high, high(b0), high(b1));
}
#endif

// scores[16 tokens x 8 heads] += keys · queriesᵀ over one block: this lane's chunk of tokens r and r + 8, and of head r.
__device__ __forceinline__ void AddScores(float (&scores)[4], uint4 upper, uint4 lower, uint4 query) {
#if DTYPE == 0
  MultiplyAddFloat(scores, {upper.x, lower.x, upper.y, lower.y}, query.x, query.y);
  MultiplyAddFloat(scores, {upper.z, lower.z, upper.w, lower.w}, query.z, query.w);
#else
  MultiplyAdd(scores, {upper.x, lower.x, upper.y, lower.y}, query.x, query.y);
  MultiplyAdd(scores, {upper.z, lower.z, upper.w, lower.w}, query.z, query.w);
#endif
}

// Weights of 16 tokens and 8 heads as the second operand of the product with V.
struct Weights {
#if DTYPE == 0
  uint32_t words[4];

  __device__ __forceinline__ explicit Weights(const float (&weights)[4]) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // token c + 4i, head r
      const int holder = (c + 4 * (i % 2)) * 4 + r / 2;
      const float even = __shfl_sync(kFullWarp, weights[i / 2 * 2], holder);
      const float odd = __shfl_sync(kFullWarp, weights[i / 2 * 2 + 1], holder);
      words[i] = __float_as_uint(r % 2 == 0 ? even : odd);
    }
  }
#else
  uint32_t words[2];

  __device__ __forceinline__ explicit Weights(const float (&weights)[4])
      : words{Transpose(Pack(weights[0], weights[1])), Transpose(Pack(weights[2], weights[3]))} {}
#endif
};

__device__ __forceinline__ uint32_t Word(uint4 chunk, int index) {
  return index == 0 ? chunk.x : index == 1 ? chunk.y : index == 2 ? chunk.z : chunk.w;
}

// output[kBlockTiles x 16 elements x 8 heads] += valuesᵀ · weights: this lane's chunk of its four tokens.
__device__ __forceinline__ void AddValues(float (*output)[4], const uint4 (&values)[4], const Weights& weights) {
#pragma unroll
  for (int tile = 0; tile < kBlockTiles; ++tile) {
#if DTYPE == 0
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint4 first = values[2 * step], second = values[2 * step + 1];
      MultiplyAddFloat(output[tile],
                       {Word(first, 2 * tile), Word(first, 2 * tile + 1), Word(second, 2 * tile), Word(second, 2 * tile + 1)},
                       weights.words[2 * step], weights.words[2 * step + 1]);
    }
#else
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = Word(values[i], tile);
    MultiplyAdd(output[tile],
                {__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
                 __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632)},
                weights.words[0], weights.words[1]);
#endif
  }
}
