// How decode splits a row's tokens among blocks; the same arithmetic on the host (grid) and on the device.
#pragma once

#include <cstdint>

namespace onnx_kv {

constexpr int kMostSplits = 128;

// Blocks of one row and KV head, each with `tokens` of the row's tokens (the last one may have fewer).
struct Splits {
  int32_t count;
  int32_t tokens;
};

// Depends on a row's own tokens alone (and on the device and the heads): neither on the capacity, the layout nor the
// batch, so that a row's sums are the same wherever it lies. `most` splits fill the device with one row; a split is a
// multiple of `unit` tokens, which a block takes at a time.
inline Splits SplitsOf(int32_t tokens, int32_t most, int32_t unit) {
  const int32_t units = tokens / unit + (tokens % unit != 0);
  const int32_t each = units / most + (units % most != 0);
  if (units == 0) return {0, unit};
  return {units / each + (units % each != 0), each * unit};
}

}  // namespace onnx_kv
