// How the work of one call is cut into pieces that threads can take in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "onnx_kv/ops/gqa/cpu/lengths.h"
#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv::cpu {

// Query rows of one sequence that are attended together: `rows` of each of the KV heads [kv_head, kv_head + heads), at
// most kMaxRows in all. Row r of head n is query head n*group + r % group of new token r / group, so that the keys it
// sees only grow with r.
struct Block {
  int32_t sequence;
  int32_t kv_head;
  int32_t heads;
  int32_t row;
  int32_t rows;
  int32_t first_tile;  // tiles that hold a key which one of the rows sees: [first_tile, last_tile)
  int32_t last_tile;
  int32_t units;   // that share the block
  size_t partial;  // if several do: place of its first tile's rows among all that are kept until they are merged

  int32_t all_rows() const { return heads * rows; }
  int32_t tiles() const { return last_tile - first_tile; }
};

// Consecutive tiles of a block.
struct Unit {
  size_t block;
  int32_t first_tile;
  int32_t last_tile;
};

struct Plan {
  std::vector<Block> blocks;
  std::vector<Unit> units;  // the longest last
  size_t partial_rows = 0;  // rows of tile states to keep
};

// Blocks are only split, along the keys, where there are fewer than `threads`.
Plan MakePlan(const GqaParams& params, const std::vector<Lengths>& lengths, size_t threads);

// First key that the query at `position` sees.
inline int32_t FirstVisible(const GqaParams& params, int32_t position) {
  return params.window > 0 && position >= params.window ? position - params.window + 1 : 0;
}

}  // namespace onnx_kv::cpu
