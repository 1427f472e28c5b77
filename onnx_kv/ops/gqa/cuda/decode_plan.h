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
// batch, so that a row's sums are the same wherever it lies. A split is a multiple of `unit` tokens, which a block takes at
// a time. `most` splits fill the device with one row; a short row takes fewer, since merging them costs time as well: as
// many as give each 64 KiB of K and V to read, or 8.
inline Splits SplitsOf(int32_t tokens, int32_t token_bytes, int32_t unit, int32_t most) {
  const int32_t units = tokens / unit + (tokens % unit != 0);
  if (units == 0) return {0, unit};
  const auto worthwhile = static_cast<int32_t>(static_cast<int64_t>(tokens) * token_bytes / 65536);
  const int32_t wanted = worthwhile < 8 ? 8 : worthwhile, limit = wanted < most ? wanted : most;
  const int32_t each = units / limit + (units % limit != 0);
  return {units / each + (units % each != 0), each * unit};
}

}  // namespace onnx_kv
