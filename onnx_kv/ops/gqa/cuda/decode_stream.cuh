// A warp's stream of cached tokens: tiles of kTile tokens from global memory into registers, a panel of K and one of V under
// way at all times. Only tokens in the cache are ever addressed; the new token comes from shared memory.
#pragma once

#include "onnx_kv/ops/gqa/cuda/decode_tile.cuh"

// Blocks of a tile that are in registers together: 32 registers each for K and V.
constexpr int kKeyPanel = kKeyBlocks < 4 ? kKeyBlocks : 4;
constexpr int kValuePanel = kValueBlocks < 2 ? kValueBlocks : 2;
constexpr int kKeyPanels = (kKeyBlocks + kKeyPanel - 1) / kKeyPanel;
constexpr int kValuePanels = (kValueBlocks + kValuePanel - 1) / kValuePanel;

class Stream {
 public:
  // `keys` and `values` are the row's first token, `stride` elements from the next; `cached` of them may be read. The warp's
  // tiles begin at `token` and every `step` tokens after it.
  __device__ __forceinline__ Stream(const Element* keys, const Element* values, int64_t stride, int cached, int token, int step)
      : advance_(step * stride), step_(step), key_room_(cached - token), value_room_(key_room_) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) key_at_[half] = keys + (token + r + 8 * half) * stride + c * kChunkElements;
#pragma unroll
    for (int i = 0; i < 4; ++i) value_at_[i] = values + (token + ValueToken(i, c)) * stride + r * kChunkElements;
  }

  // Starts loading a panel of this tile. Tokens that are not in the cache keep what the registers hold.
  __device__ __forceinline__ void LoadKeys(int panel) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = r + 8 * half < key_room_;
#pragma unroll
      for (int i = 0; i < kKeyPanel; ++i) {
        const int block = panel * kKeyPanel + i;
        if (block >= kKeyBlocks) continue;
        const bool inside = kRowChunks % 4 == 0 || block * 4 + c < kRowChunks;
        if (panel > 0 && !inside) key[i][half] = uint4{};
        LoadStreaming(key[i][half], key_at_[half] + block * 4 * kChunkElements, exists && inside);
      }
    }
  }

  __device__ __forceinline__ void LoadValues(int panel) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int token = 0; token < 4; ++token) {
      const bool exists = ValueToken(token, c) < value_room_;
#pragma unroll
      for (int i = 0; i < kValuePanel; ++i) {
        const int block = panel * kValuePanel + i;
        if (block >= kValueBlocks) continue;
        const bool inside = kRowChunks % 8 == 0 || block * 8 + r < kRowChunks;
        if (panel > 0 && !inside) value[i][token] = uint4{};
        LoadStreaming(value[i][token], value_at_[token] + block * 8 * kChunkElements, exists && inside);
      }
    }
  }

  __device__ __forceinline__ void NextKeys() {
    key_room_ -= step_;
#pragma unroll
    for (int half = 0; half < 2; ++half) key_at_[half] += advance_;
  }

  __device__ __forceinline__ void NextValues() {
    value_room_ -= step_;
#pragma unroll
    for (int i = 0; i < 4; ++i) value_at_[i] += advance_;
  }

  // Puts the new token, which follows the cached ones, where this tile has it; `fresh` is its K or V.
  __device__ __forceinline__ void CompleteKeys(int panel, const unsigned char* fresh) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (r + 8 * half != key_room_) continue;
#pragma unroll
      for (int i = 0; i < kKeyPanel; ++i) {
        const int chunk = (panel * kKeyPanel + i) * 4 + c;
        if (chunk < kRowChunks) key[i][half] = reinterpret_cast<const uint4*>(fresh)[chunk];
      }
    }
  }

  __device__ __forceinline__ void CompleteValues(int panel, const unsigned char* fresh) {
    const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
    for (int token = 0; token < 4; ++token) {
      if (ValueToken(token, c) != value_room_) continue;
#pragma unroll
      for (int i = 0; i < kValuePanel; ++i) {
        const int chunk = (panel * kValuePanel + i) * 8 + r;
        if (chunk < kRowChunks) value[i][token] = reinterpret_cast<const uint4*>(fresh)[chunk];
      }
    }
  }

  uint4 key[kKeyPanel][2] = {};  // of tokens r and r + 8
  uint4 value[kValuePanel][4] = {};

 private:
  const Element* key_at_[2];
  const Element* value_at_[4];
  int64_t advance_;
  int step_;
  int key_room_;  // cached tokens from the tile's first on
  int value_room_;
};
