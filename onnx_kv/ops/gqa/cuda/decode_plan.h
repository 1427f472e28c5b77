// How decode splits a row's tokens among blocks; the host needs it for the grid and the workspace, the device for the rest.
#pragma once

#include <cstdint>

namespace onnx_kv {

// Blocks of one row and KV head, each with `tokens` of the row's tokens (the last one may have fewer).
struct Splits {
  int32_t count;
  int32_t tokens;
};

// Depends on a row's own tokens, never on the capacity, the layout or the other rows' lengths: a row's sums are the same
// wherever it lies. A split is a multiple of `unit` tokens, which a block takes at a time. A short row takes fewer splits,
// since merging them costs time as well: one for every `worthwhile` tokens, but 8 in any case, if there are units for them.
struct SplitRule {
  int32_t most;
  int32_t worthwhile;

  inline Splits Of(int32_t tokens, int32_t unit) const {
    const auto units = static_cast<uint32_t>(tokens + unit - 1) / static_cast<uint32_t>(unit);
    if (units == 0) return {0, unit};
    uint32_t wanted = static_cast<uint32_t>(tokens) / static_cast<uint32_t>(worthwhile);
    wanted = wanted < 8 ? 8 : wanted;
    const uint32_t limit = wanted < static_cast<uint32_t>(most) ? wanted : static_cast<uint32_t>(most);
    const uint32_t each = (units + limit - 1) / limit;
    return {static_cast<int32_t>((units + each - 1) / each), static_cast<int32_t>(each) * unit};
  }
};

// Floats that a split leaves in the workspace: its heads' outputs, and a maximum and a sum a head.
inline int32_t SplitFloats(int32_t heads, int32_t head_dim) { return heads * (head_dim + 2); }

}  // namespace onnx_kv
