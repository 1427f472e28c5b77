// A warp's stream of cached tokens: tiles of TILE tokens, K and V, through a ring of STAGES in shared memory.
//
// Only tokens in the cache are ever addressed: a tile that reaches beyond them is completed from shared memory. With BULK
// (sm_90 and later) the copy engine fetches a row an instruction, and an mbarrier a stage counts its bytes; otherwise every
// lane copies 16 bytes at a time.
#pragma once

#include "onnx_kv/ops/gqa/cuda/decode_tile.cuh"

constexpr int kSideBytes = TILE * kRowPitch;
constexpr int kStageBytes = 2 * kSideBytes;
constexpr int kRingBytes = STAGES * kStageBytes;

class Stream {
 public:
  // `keys` and `values` are the row's first token, of which `cached` may be read. `ring` and `barriers` (one a stage) are
  // the warp's own.
  __device__ __forceinline__ Stream(const Element* keys, const Element* values, int64_t stride, int cached, uint32_t ring,
                                    uint32_t barriers)
      : keys_(keys), values_(values), stride_(stride), cached_(cached), ring_(ring), barriers_(barriers), lane_(threadIdx.x % 32) {
#if BULK
    if (lane_ < STAGES) InitBarrier(barriers + lane_ * 8, 1);
    FenceBarrierInit();
    __syncwarp();
#endif
  }

  __device__ __forceinline__ uint32_t Tile(int stage) const { return ring_ + stage * kStageBytes; }

#if BULK
  // Starts the copies of the tile that begins at `token`, if that is before `end`.
  __device__ __forceinline__ void Fetch(int token, int end, int stage) const {
    if (token >= end) return;
    constexpr int kBytes = HEAD_DIM * sizeof(Element);
    const int rows = max(0, min(TILE, cached_ - token));
    const uint32_t barrier = barriers_ + stage * 8;
    if (lane_ == 0) ExpectBytes(barrier, 2 * rows * kBytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * TILE / 32; ++i) {
      const int row = (i * 32 + lane_) % TILE, side = (i * 32 + lane_) / TILE;
      if (row >= rows) continue;
      CopyBulk(Tile(stage) + side * kSideBytes + row * kRowPitch, (side == 0 ? keys_ : values_) + (token + row) * stride_,
               kBytes, barrier);
    }
  }

  // Waits for the tile in `stage`; stages are awaited in turn. All lanes are done with the stage before it.
  __device__ __forceinline__ void Await(int stage) {
    AwaitBarrier(barriers_ + stage * 8, phase_);
    if (stage == STAGES - 1) phase_ ^= 1;
    __syncwarp();
  }
#else
  __device__ __forceinline__ void Fetch(int token, int end, int stage) const {
    if (token < end) {
      FetchSide(keys_, token, Tile(stage));
      FetchSide(values_, token, Tile(stage) + kSideBytes);
    }
    CommitCopies();
  }

  __device__ __forceinline__ void Await(int) {
    WaitCopies<STAGES - 2>();
    __syncwarp();
  }
#endif

  // Rows of a fetched tile that are not in the cache: the new token (`fresh`: K, then V), then zeros, which the mask ignores.
  __device__ __forceinline__ void Complete(int token, int stage, const unsigned char* fresh) const {
    for (int index = lane_; index < TILE * kRowChunks; index += 32) {
      const int row = index / kRowChunks, chunk = index % kRowChunks;
      if (token + row < cached_) continue;
      uint4 key{}, value{};
      if (token + row == cached_) {
        key = *reinterpret_cast<const uint4*>(fresh + chunk * 16);
        value = *reinterpret_cast<const uint4*>(fresh + kRowPitch + chunk * 16);
      }
      const uint32_t place = Tile(stage) + row * kRowPitch + chunk * 16;
      StoreShared(place, key);
      StoreShared(place + kSideBytes, value);
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void FetchSide(const Element* cache, int token, uint32_t target) const {
    const Element* base = cache + token * stride_;
#pragma unroll
    for (int i = 0; i < (TILE * kRowChunks + 31) / 32; ++i) {
      const int index = i * 32 + lane_, row = index / kRowChunks, chunk = index % kRowChunks;
      if ((TILE * kRowChunks % 32 != 0 && row >= TILE) || token + row >= cached_) continue;
      CopyAsync(target + row * kRowPitch + chunk * 16, base + row * stride_ + chunk * kChunkElements);
    }
  }

  const Element* keys_;
  const Element* values_;
  int64_t stride_;
  int cached_;
  uint32_t ring_;
  uint32_t barriers_;
  int lane_;
  uint32_t phase_ = 0;
};
