// The kernels of kernels.h, written on the vectors of whichever simd_*.h was included before.
//
// Included by one source file per instruction set, which is compiled with that set's flags. So everything here has
// internal linkage, and no function of the standard library is called: a shared inline function could otherwise be
// linked in the version of a processor that is not there.
//
// Register blocks may cover any rows and keys without changing a bit of the result: a score is always summed along the
// head's channels vector by vector, an output element always along the keys one by one.
#pragma once

#include <type_traits>

#include "onnx_kv/ops/gqa/cpu/elementwise.h"
#include "onnx_kv/ops/gqa/cpu/kernels.h"

namespace onnx_kv::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();
// The float above -65504, float16's lowest: a bias below it is a mask.
constexpr float kAboveLowestHalf = -65503.996f;
constexpr int kAhead = 8;           // keys between asking for a row of the cache and reading it
constexpr int kStep = 32;           // keys that are summed into all panels before the next ones are
constexpr int kPanel = 2 * kWidth;  // channels of one block of weighted sums

inline int Least(int a, int b) { return a < b ? a : b; }
inline int Most(int a, int b) { return a > b ? a : b; }

// Splits `rows` evenly into blocks of at most `most` and calls block(begin, end).
template <typename Block>
inline void ForBlocks(int rows, int most, Block&& block) {
  const int blocks = (rows + most - 1) / most;
  const int least = rows / blocks;
  const int longer = rows % blocks;
  for (int i = 0, begin = 0; i < blocks; ++i) {
    const int end = begin + least + (i < longer ? 1 : 0);
    block(begin, end);
    begin = end;
  }
}

// Scores of `Rows` queries and four keys.
template <int Rows>
inline void DotBlock(const float* query, int query_stride, const float* const* keys, int channels, float* scores) {
  Vec sums[Rows][4];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = Set(0.0f);
  }
  for (int d = 0; d < channels; d += kWidth) {
    Vec q[Rows];
    for (int r = 0; r < Rows; ++r) q[r] = Load(query + r * query_stride + d);
    for (int k = 0; k < 4; ++k) {
      const Vec key = Load(keys[k] + d);
      for (int r = 0; r < Rows; ++r) sums[r][k] = Fma(q[r], key, sums[r][k]);
    }
  }
  for (int r = 0; r < Rows; ++r) SumsOf(sums[r], scores + r * kTileKeys);
}

template <int Rows = kDotRows>
inline void Dot(int rows, const float* query, int query_stride, const float* const* keys, int channels, float* scores) {
  if (rows == Rows) {
    DotBlock<Rows>(query, query_stride, keys, channels, scores);
  } else if constexpr (Rows > 1) {
    Dot<Rows - 1>(rows, query, query_stride, keys, channels, scores);
  }
}

// Whether positions lie so far apart that only we can foresee which memory is read next.
template <typename T>
inline bool FarApart(const Tile& tile) {
  return tile.stride * static_cast<int64_t>(sizeof(T)) >= 2048;
}

// If so, asks for row t of the cache some time before it is read. Only live rows are asked for.
template <typename T>
inline void Prefetch(const Tile& tile, const T* rows, int t) {
  constexpr int kLine = 64 / sizeof(T);
  if (!FarApart<T>(tile) || t >= tile.last) return;
  for (int d = 0; d < tile.head_dim; d += kLine) __builtin_prefetch(rows + t * tile.stride + d);
}

// Scores of one head's rows and four keys from t on. Keys are read in place where whole vectors of floats can be.
template <typename T>
void FourScores(const Tile& tile, int head, int t) {
  const int padded = PaddedDim(tile.head_dim);
  const bool in_place = kIsFloat<T> && tile.head_dim % kWidth == 0;
  const int channels = in_place ? tile.head_dim : padded;
  const T* base = static_cast<const T*>(tile.key) + head * tile.head_stride;
  const float* keys[4];
  for (int k = 0; k < 4; ++k) {
    Prefetch(tile, base, t + k + kAhead);
    // The nearest live key stands in for one that is not: nothing else is read, and its score there is not used.
    const T* key = base + Most(tile.first, Least(t + k, tile.last - 1)) * tile.stride;
    if (in_place) {
      keys[k] = reinterpret_cast<const float*>(key);
    } else {
      Stage(key, tile.head_dim, tile.staged + k * padded, padded);
      keys[k] = tile.staged + k * padded;
    }
  }
  const int row = head * tile.rows;
  ForBlocks(tile.rows, kDotRows, [&](int begin, int end) {
    Dot(end - begin, tile.query + (row + begin) * padded, padded, keys, channels,
        tile.scores + (row + begin) * kTileKeys + t);
  });
}

// Scores of all rows and keys. Heads inside: where a position's heads lie together, the cache is read front to back.
template <typename T>
void Scores(const Tile& tile) {
  for (int t = tile.first / 4 * 4; t < tile.last; t += 4) {
    for (int head = 0; head < tile.heads; ++head) FourScores<T>(tile, head, t);
  }
}

template <typename T>
void AddBias(const Tile& tile, int row, int first, int last) {
  float* scores = tile.scores + row * kTileKeys;
  float* bias = tile.staged;
  Convert(static_cast<const T*>(tile.bias[row]) + first, bias + first, last - first);
  for (int t = first; t < last; ++t) {
    scores[t] = bias[t] < kAboveLowestHalf ? -kInfinity : scores[t] + bias[t];
  }
}

// Turns a row of scores into weights.
template <typename T>
void SoftMax(const Tile& tile, int row, const State& state) {
  float* scores = tile.scores + row * kTileKeys;
  const int first = Most(tile.row_first[row % tile.rows], tile.first);
  const int last = Least(tile.row_last[row % tile.rows], tile.last);
  state.peak[row] = -kInfinity;
  state.sum[row] = 0.0f;
  if (first >= last) return;
  const int begin = first / kWidth * kWidth;
  const int end = (last + kWidth - 1) / kWidth * kWidth;
  if (tile.softcap > 0) {
    for (int t = begin; t < end; t += kWidth) Store(scores + t, SoftCap(Load(scores + t), tile.softcap));
  }
  if (tile.bias != nullptr) AddBias<T>(tile, row, first, last);
  for (int t = begin; t < first; ++t) scores[t] = -kInfinity;
  for (int t = last; t < end; ++t) scores[t] = -kInfinity;
  Vec most = Set(-kInfinity);
  for (int t = begin; t < end; t += kWidth) most = Max(most, Load(scores + t));
  const float peak = MaxOf(most);
  state.peak[row] = peak;
  Vec sum = Set(0.0f);
  for (int t = begin; t < end; t += kWidth) {
    const Vec weight = peak == -kInfinity ? Set(0.0f) : Exp(Sub(Load(scores + t), Set(peak)));
    Store(scores + t, weight);
    sum = Add(sum, weight);
  }
  state.sum[row] = SumOf(sum);
}

// Adds the values of `keys` keys, weighted, to one panel of `Rows` outputs.
template <int Rows>
inline void SumBlock(const float* weights, const float* values, int64_t value_stride, int keys, float* out,
                     int out_stride) {
  Vec sums[Rows][2];
  for (int r = 0; r < Rows; ++r) {
    sums[r][0] = Load(out + r * out_stride);
    sums[r][1] = Load(out + r * out_stride + kWidth);
  }
  for (int t = 0; t < keys; ++t) {
    const Vec low = Load(values);
    const Vec high = Load(values + kWidth);
    values += value_stride;
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = Set(weights[r * kTileKeys + t]);
      sums[r][0] = Fma(weight, low, sums[r][0]);
      sums[r][1] = Fma(weight, high, sums[r][1]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    Store(out + r * out_stride, sums[r][0]);
    Store(out + r * out_stride + kWidth, sums[r][1]);
  }
}

template <int Rows = kSumRows>
inline void Sum(int rows, const float* weights, const float* values, int64_t value_stride, int keys, float* out,
                int out_stride) {
  if (rows == Rows) {
    SumBlock<Rows>(weights, values, value_stride, keys, out, out_stride);
  } else if constexpr (Rows > 1) {
    Sum<Rows - 1>(rows, weights, values, value_stride, keys, out, out_stride);
  }
}

// Adds the keys [first, last) to one panel of the outputs of one head's rows [begin, end). `weights`, `values` and
// `out` are those of the head's first row and the tile's first position. Keys that not all of the rows see are added
// row by row, so that what a row does not see, were it infinite, cannot reach it.
void SumPanel(const Tile& tile, int begin, int end, int first, int last, const float* weights, const float* values,
              int64_t value_stride, float* out) {
  const int padded = PaddedDim(tile.head_dim);
  const auto sum = [&](int row, int rows, int from, int to) {
    if (from >= to) return;
    Sum(rows, weights + row * kTileKeys + from, values + from * value_stride, value_stride, to - from,
        out + row * padded, padded);
  };
  int shared_first = first;
  int shared_last = last;
  for (int r = begin; r < end; ++r) {
    shared_first = Most(shared_first, tile.row_first[r]);
    shared_last = Least(shared_last, tile.row_last[r]);
  }
  if (shared_first >= shared_last) shared_first = shared_last = last;
  for (int r = begin; r < end; ++r) {
    sum(r, 1, Most(tile.row_first[r], first), Least(Least(tile.row_last[r], last), shared_first));
  }
  sum(begin, end - begin, shared_first, shared_last);
  for (int r = begin; r < end; ++r) sum(r, 1, shared_last, Least(tile.row_last[r], last));
}

// Gathers the values of one head panel by panel: [panel, kTileKeys, kPanel].
template <typename T>
void StageValues(const Tile& tile, int head) {
  const T* values = static_cast<const T*>(tile.value) + head * tile.head_stride;
  for (int t = tile.first; t < tile.last; ++t) {
    Prefetch(tile, values, t + kAhead);
    const T* value = values + t * tile.stride;
    float* staged = tile.staged + t * kPanel;
    int column = 0;
    for (; column + kPanel <= tile.head_dim; column += kPanel) {
      Store(staged + column * kTileKeys, Load(value + column));
      Store(staged + column * kTileKeys + kWidth, Load(value + column + kWidth));
    }
    if (column < tile.head_dim) Stage(value + column, tile.head_dim - column, staged + column * kTileKeys, kPanel);
  }
}

template <typename T>
void WeightedSums(const Tile& tile, const State& state) {
  const int padded = PaddedDim(tile.head_dim);
  for (int i = 0; i < tile.heads * tile.rows * padded; ++i) state.out[i] = 0.0f;
  const auto panels = [&](int head, int first, int last, const float* values, int64_t value_stride, int panel_stride) {
    const int row = head * tile.rows;
    for (int column = 0; column < tile.head_dim; column += kPanel) {
      ForBlocks(tile.rows, kSumRows, [&](int begin, int end) {
        SumPanel(tile, begin, end, first, last, tile.scores + row * kTileKeys, values + column * panel_stride,
                 value_stride, state.out + row * padded + column);
      });
    }
  };
  // Few rows read floats in place, many read a value often enough to gather it first.
  if (kIsFloat<T> && tile.head_dim % kPanel == 0 && tile.rows <= 2 * kSumRows) {
    const int step = FarApart<T>(tile) ? kStep : kTileKeys;
    for (int first = tile.first; first < tile.last; first += step) {
      const int last = Least(first + step, tile.last);
      for (int head = 0; head < tile.heads; ++head) {
        const auto* values = static_cast<const float*>(tile.value) + head * tile.head_stride;
        for (int t = first; t < last; ++t) Prefetch(tile, values, t + step);
        panels(head, first, last, values, tile.stride, 1);
      }
    }
    return;
  }
  for (int head = 0; head < tile.heads; ++head) {
    StageValues<T>(tile, head);
    panels(head, tile.first, tile.last, tile.staged, kPanel, kTileKeys);
  }
}

void AttendTile(const Tile& tile, const State& state) {
  WithElement(tile.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    Scores<T>(tile);
    for (int r = 0; r < tile.heads * tile.rows; ++r) SoftMax<T>(tile, r, state);
    WeightedSums<T>(tile, state);
  });
}

void Merge(const State& state, const State& next, int rows, int head_dim) {
  const int padded = PaddedDim(head_dim);
  for (int r = 0; r < rows; ++r) {
    if (next.peak[r] == -kInfinity) continue;
    const float peak = state.peak[r] > next.peak[r] ? state.peak[r] : next.peak[r];
    const float keep = Exp(state.peak[r] - peak);
    const float take = Exp(next.peak[r] - peak);
    state.peak[r] = peak;
    state.sum[r] = state.sum[r] * keep + next.sum[r] * take;
    float* out = state.out + r * padded;
    const float* more = next.out + r * padded;
    for (int d = 0; d < head_dim; d += kWidth) {
      Store(out + d, Fma(Load(out + d), Set(keep), Mul(Load(more + d), Set(take))));
    }
  }
}

void Finish(const State& state, int row, int head_dim, float sink) {
  float* out = state.out + row * PaddedDim(head_dim);
  const float peak = state.peak[row];
  float factor = 0.0f;  // also where no key is seen
  if (peak != -kInfinity) {
    const float top = peak > sink ? peak : sink;
    const float rescale = Exp(peak - top);
    factor = rescale / (state.sum[row] * rescale + Exp(sink - top));
  }
  for (int d = 0; d < head_dim; d += kWidth) Store(out + d, Mul(Load(out + d), Set(factor)));
}

constexpr Kernels MakeKernels(const char* name) { return {name, Widen, Narrow, AttendTile, Merge, Finish}; }

}  // namespace
}  // namespace onnx_kv::cpu
