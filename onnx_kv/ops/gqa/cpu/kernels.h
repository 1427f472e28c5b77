// What is compiled once for every instruction set: the inner loops of attention, on float32 with float32 sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv::cpu {

inline constexpr int kTileKeys = 128;  // keys of a tile; tile i holds the positions [i*kTileKeys, (i+1)*kTileKeys)
inline constexpr int kMaxRows = 64;    // query rows that a tile serves at once
inline constexpr int kPad = 32;        // rows of float scratch are padded to this many elements (two widest vectors)

// Elements of 16 bits; what they hold is read and written by the vectors' Load and Store.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline int PaddedDim(int head_dim) { return (head_dim + kPad - 1) / kPad * kPad; }

inline size_t ElementSize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The softmax over some keys of some query rows, before it is divided: weights are exp(score - peak), `sum` their sum,
// `out` the sum of weighted values. A row without a visible key has peak -inf, sum 0 and out 0.
struct State {
  float* peak;  // [rows]
  float* sum;   // [rows]
  float* out;   // [rows, padded dim]
};

// Query rows [heads, rows] over the keys of one tile of the cache; all heads' rows see the same keys.
struct Tile {
  DType dtype;  // of the cache and the bias
  int head_dim;
  int heads;  // KV heads
  int rows;   // query rows of each; heads * rows is at most kMaxRows
  float softcap;

  const float* query;  // [heads, rows, padded dim], scaled, padding is zero
  const void* key;     // of the first head at the tile's first position
  const void* value;
  int64_t head_stride;  // elements of the cache from one head to the next
  int64_t stride;       // and from one position to the next
  int first;            // keys that any row sees: [first, last) within the tile
  int last;
  const int* row_first;  // [rows] keys that a row sees: [row_first, row_last), empty where they cross
  const int* row_last;
  const void* const* bias;  // [heads, rows] the row's bias of the tile's first position; or nullptr

  float* scores;  // scratch [heads, rows, kTileKeys]
  float* staged;  // scratch [kTileKeys, padded dim]
};

struct Kernels {
  const char* name;
  // Conversion of `count` elements from and to float32.
  void (*widen)(DType dtype, const void* source, float* target, int count);
  void (*narrow)(DType dtype, const float* source, void* target, int count);
  // The softmax state of one tile.
  void (*attend)(const Tile& tile, const State& state);
  // Appends `next`, the state over later keys, to `state`.
  void (*merge)(const State& state, const State& next, int rows, int head_dim);
  // Divides by the denominator, to which a `sink` (if not -inf) adds exp(sink): row r of `state` becomes the output.
  void (*finish)(const State& state, int row, int head_dim, float sink);
};

// The kernels for the best instruction set that this processor has, or for the one that the environment variable
// ONNX_KV_CPU_KERNELS names, which is read once. Throws Error where it names none that can be run here.
const Kernels& ChosenKernels();

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace onnx_kv::cpu
