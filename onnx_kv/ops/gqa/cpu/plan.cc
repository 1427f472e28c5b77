#include "onnx_kv/ops/gqa/cpu/plan.h"

#include <algorithm>

#include "onnx_kv/ops/gqa/cpu/kernels.h"

namespace onnx_kv::cpu {
namespace {

void AddBlocks(const GqaParams& p, const Lengths& lengths, int32_t sequence, Plan& plan) {
  const int32_t group = p.q_heads / p.kv_heads;
  const int64_t rows = int64_t{lengths.fresh} * group;
  for (int32_t n = 0; n < p.kv_heads; ++n) {
    for (int64_t row = 0; row < rows; row += kMaxRows) {
      const auto count = static_cast<int32_t>(std::min<int64_t>(kMaxRows, rows - row));
      const auto first_position = static_cast<int32_t>(lengths.past() + row / group);
      const auto last_position = static_cast<int32_t>(lengths.past() + (row + count - 1) / group);
      Block block{};
      block.sequence = sequence;
      block.kv_head = n;
      block.row = static_cast<int32_t>(row);
      block.rows = count;
      block.first_tile = FirstVisible(p, first_position) / kTileKeys;
      block.last_tile = last_position / kTileKeys + 1;
      plan.blocks.push_back(block);
    }
  }
}

}  // namespace

Plan MakePlan(const GqaParams& params, const std::vector<Lengths>& lengths, size_t threads) {
  Plan plan;
  for (int32_t b = 0; b < params.batch; ++b) AddBlocks(params, lengths[b], b, plan);

  size_t tiles = 0;
  for (const Block& block : plan.blocks) tiles += block.last_tile - block.first_tile;
  const bool few = plan.blocks.size() < threads;
  const auto span = static_cast<int32_t>(few ? (tiles + threads - 1) / threads : tiles);
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    Block& block = plan.blocks[i];
    block.split = block.last_tile - block.first_tile > span;
    block.partial = plan.partial_rows;
    if (block.split) plan.partial_rows += static_cast<size_t>(block.last_tile - block.first_tile) * block.rows;
    for (int32_t tile = block.first_tile; tile < block.last_tile; tile += span) {
      plan.units.push_back({i, tile, std::min(tile + span, block.last_tile)});
    }
  }
  return plan;
}

}  // namespace onnx_kv::cpu
