#include "onnx_kv/ops/gqa/cpu/plan.h"

#include <algorithm>

#include "onnx_kv/ops/gqa/cpu/kernels.h"

namespace onnx_kv::cpu {
namespace {

constexpr size_t kUnitsPerThread = 2;  // of a split block, so that a thread that is held up does not hold up the call
constexpr int64_t kFarApart = 512;     // elements from one position to the next

// KV heads of one block. Where the heads of a position lie together and positions far apart, a decode reads them
// together, if that leaves enough pieces for all threads.
int32_t HeadsTogether(const GqaParams& p, int64_t rows, int32_t tiles, size_t threads) {
  const bool apart = p.present.head > p.head_dim || p.present.seq < kFarApart;
  if (apart || rows > kMaxRows / 2) return 1;
  const size_t pieces = static_cast<size_t>(p.batch) * p.kv_heads * tiles / (kUnitsPerThread * threads);
  const size_t most = std::min<size_t>(kMaxRows / rows, p.kv_heads);
  return static_cast<int32_t>(std::clamp<size_t>(pieces, 1, most));
}

void AddBlocks(const GqaParams& p, const Lengths& lengths, int32_t sequence, size_t threads, Plan& plan) {
  const int32_t group = p.q_heads / p.kv_heads;
  const int64_t rows = int64_t{lengths.fresh} * group;
  if (rows == 0) return;
  const int32_t heads = HeadsTogether(p, rows, (lengths.total + kTileKeys - 1) / kTileKeys, threads);
  for (int32_t n = 0; n < p.kv_heads; n += heads) {
    for (int64_t row = 0; row < rows; row += kMaxRows) {
      const int64_t end = std::min<int64_t>(row + kMaxRows, rows);
      Block block{};
      block.sequence = sequence;
      block.kv_head = n;
      block.heads = std::min(heads, p.kv_heads - n);
      block.row = static_cast<int32_t>(row);
      block.rows = static_cast<int32_t>(end - row);
      block.first_tile = FirstVisible(p, static_cast<int32_t>(lengths.past() + row / group)) / kTileKeys;
      block.last_tile = static_cast<int32_t>(lengths.past() + (end - 1) / group) / kTileKeys + 1;
      plan.blocks.push_back(block);
    }
  }
}

}  // namespace

Plan MakePlan(const GqaParams& params, const std::vector<Lengths>& lengths, size_t threads) {
  Plan plan;
  for (int32_t b = 0; b < params.batch; ++b) AddBlocks(params, lengths[b], b, threads, plan);

  size_t tiles = 0;
  for (const Block& block : plan.blocks) tiles += block.tiles();
  const bool few = plan.blocks.size() < threads;
  const size_t pieces = kUnitsPerThread * threads;
  const auto span = static_cast<int32_t>(few ? (tiles + pieces - 1) / pieces : tiles);
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    Block& block = plan.blocks[i];
    block.units = (block.tiles() + span - 1) / span;
    block.partial = plan.partial_rows;
    if (block.units > 1) plan.partial_rows += static_cast<size_t>(block.tiles()) * block.all_rows();
    for (int32_t tile = block.first_tile; tile < block.last_tile; tile += span) {
      plan.units.push_back({i, tile, std::min(tile + span, block.last_tile)});
    }
  }
  return plan;
}

}  // namespace onnx_kv::cpu
