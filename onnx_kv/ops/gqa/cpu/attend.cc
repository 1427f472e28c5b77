#include "onnx_kv/ops/gqa/cpu/attend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "onnx_kv/ops/gqa/cpu/append.h"
#include "onnx_kv/ops/gqa/cpu/heads.h"
#include "onnx_kv/ops/gqa/cpu/kernels.h"
#include "onnx_kv/ops/gqa/cpu/lengths.h"
#include "onnx_kv/ops/gqa/cpu/plan.h"

namespace onnx_kv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

size_t StateFloats(size_t rows, int head_dim) { return rows * (PaddedDim(head_dim) + 2); }

State StateAt(float* memory, size_t rows) { return {memory, memory + rows, memory + 2 * rows}; }

// What one thread needs for one block at a time.
struct Lane {
  Lane(float* memory, int head_dim)
      : query(memory),
        scores(query + kMaxRows * PaddedDim(head_dim)),
        staged(scores + kMaxRows * kTileKeys),
        head(staged + StagedFloats(head_dim)),
        tile(StateAt(head + PaddedDim(head_dim), kMaxRows)),
        total(StateAt(head + PaddedDim(head_dim) + StateFloats(kMaxRows, head_dim), kMaxRows)) {}

  static size_t StagedFloats(int head_dim) { return kTileKeys * PaddedDim(head_dim); }
  static size_t Floats(int head_dim) {
    return kMaxRows * (PaddedDim(head_dim) + kTileKeys) + StagedFloats(head_dim) + PaddedDim(head_dim) +
           2 * StateFloats(kMaxRows, head_dim);
  }

  float* query;
  float* scores;
  float* staged;
  float* head;
  State tile;
  State total;
  int row_first[kMaxRows];
  int row_last[kMaxRows];
  const void* bias[kMaxRows];
};

class Attention {
 public:
  Attention(const GqaParams& params, const std::vector<Lengths>& lengths, const Kernels& kernels)
      : p_(params),
        lengths_(lengths),
        kernels_(kernels),
        group_(params.q_heads / params.kv_heads),
        element_(ElementSize(params.dtype)) {}

  void Run(const ParallelFor& parallel_for);

 private:
  void RunUnit(const Unit& unit, Lane& lane);
  void MergeBlock(const Block& block);
  void TakeQueries(const Block& block, Lane& lane);
  void AttendTile(const Block& block, int32_t index, Lane& lane, const State& state);
  void Write(const Block& block, const State& total);

  struct QueryRow {
    int32_t token;  // of the call
    int32_t head;   // query head
  };

  QueryRow RowOf(const Block& block, int32_t i) const {
    const int32_t row = block.row + i % block.rows;
    return {row / group_, (block.kv_head + i / block.rows) * group_ + row % group_};
  }

  State Partial(const Block& block, int32_t tile) {
    const size_t row = block.partial + static_cast<size_t>(tile - block.first_tile) * block.all_rows();
    return StateAt(partials_ + StateFloats(row, p_.head_dim), block.all_rows());
  }

  const GqaParams& p_;
  const std::vector<Lengths>& lengths_;
  const Kernels& kernels_;
  const int32_t group_;
  const size_t element_;
  Plan plan_;
  std::vector<std::atomic<int32_t>> left_;  // [blocks] units that have not ended
  float* partials_ = nullptr;
};

// Every lane takes units until none is left, the longest first.
void Attention::Run(const ParallelFor& parallel_for) {
  const size_t threads = std::max(1u, std::thread::hardware_concurrency());
  plan_ = MakePlan(p_, lengths_, threads);
  const size_t lanes = std::min(threads, plan_.units.size());
  const size_t lane_floats = Lane::Floats(p_.head_dim);
  // Kept between calls: a decoder calls once a layer, with the same sizes.
  thread_local std::unique_ptr<float[]> memory;
  thread_local size_t size = 0;
  const size_t floats = lanes * lane_floats + StateFloats(plan_.partial_rows, p_.head_dim);
  if (size < floats) {
    memory = std::make_unique_for_overwrite<float[]>(floats);
    size = floats;
  }
  float* const base = memory.get();
  partials_ = base + lanes * lane_floats;

  left_ = std::vector<std::atomic<int32_t>>(plan_.blocks.size());
  for (size_t i = 0; i < left_.size(); ++i) left_[i] = plan_.blocks[i].units;
  std::atomic<size_t> taken = 0;
  parallel_for(lanes, [&](size_t index) {
    Lane lane(base + index * lane_floats, p_.head_dim);
    const size_t count = plan_.units.size();
    for (size_t i = taken++; i < count; i = taken++) RunUnit(plan_.units[count - 1 - i], lane);
  });
}

void Attention::RunUnit(const Unit& unit, Lane& lane) {
  const Block& block = plan_.blocks[unit.block];
  TakeQueries(block, lane);
  if (block.units > 1) {
    for (int32_t i = unit.first_tile; i < unit.last_tile; ++i) AttendTile(block, i, lane, Partial(block, i));
    if (--left_[unit.block] == 0) MergeBlock(block);  // whoever ends last
    return;
  }
  AttendTile(block, unit.first_tile, lane, lane.total);
  for (int32_t i = unit.first_tile + 1; i < unit.last_tile; ++i) {
    AttendTile(block, i, lane, lane.tile);
    kernels_.merge(lane.total, lane.tile, block.all_rows(), p_.head_dim);
  }
  Write(block, lane.total);
}

void Attention::MergeBlock(const Block& block) {
  const State total = Partial(block, block.first_tile);
  for (int32_t i = block.first_tile + 1; i < block.last_tile; ++i) {
    kernels_.merge(total, Partial(block, i), block.all_rows(), p_.head_dim);
  }
  Write(block, total);
}

void Attention::TakeQueries(const Block& block, Lane& lane) {
  const HeadTransform transform(p_, kernels_);
  const int padded = PaddedDim(p_.head_dim);
  const int32_t past = lengths_[block.sequence].past();
  for (int32_t i = 0; i < block.all_rows(); ++i) {
    const QueryRow row = RowOf(block, i);
    const int64_t from =
        (int64_t{block.sequence} * p_.q_len + row.token) * p_.query_token_stride + int64_t{row.head} * p_.head_dim;
    float* query = lane.query + i * padded;
    kernels_.widen(p_.dtype, static_cast<const char*>(p_.query) + from * element_, query, p_.head_dim);
    transform.Query(query, transform.Position(block.sequence, row.token, past), lane.head);
    for (int d = 0; d < p_.head_dim; ++d) query[d] *= p_.scale;
    for (int d = p_.head_dim; d < padded; ++d) query[d] = 0;
  }
}

void Attention::AttendTile(const Block& block, int32_t index, Lane& lane, const State& state) {
  const int64_t start = int64_t{index} * kTileKeys;
  const int64_t at = block.sequence * p_.present.batch + block.kv_head * p_.present.head + start * p_.present.seq;
  Tile tile{};
  tile.dtype = p_.dtype;
  tile.head_dim = p_.head_dim;
  tile.heads = block.heads;
  tile.rows = block.rows;
  tile.softcap = p_.softcap;
  tile.query = lane.query;
  tile.key = static_cast<const char*>(p_.present_key) + at * element_;
  tile.value = static_cast<const char*>(p_.present_value) + at * element_;
  tile.head_stride = p_.present.head;
  tile.stride = p_.present.seq;
  tile.scores = lane.scores;
  tile.staged = lane.staged;
  tile.row_first = lane.row_first;
  tile.row_last = lane.row_last;
  for (int32_t i = 0; i < block.all_rows(); ++i) {
    const QueryRow row = RowOf(block, i);
    if (i < block.rows) {
      const int32_t position = lengths_[block.sequence].past() + row.token;
      lane.row_first[i] = static_cast<int>(std::clamp<int64_t>(FirstVisible(p_, position) - start, 0, kTileKeys));
      lane.row_last[i] = static_cast<int>(std::clamp<int64_t>(position + 1 - start, 0, kTileKeys));
    }
    if (p_.attention_bias == nullptr) continue;
    const int64_t bias =
        block.sequence * p_.bias_batch_stride + row.head * p_.bias_head_stride + row.token * p_.bias_row_stride + start;
    lane.bias[i] = static_cast<const char*>(p_.attention_bias) + bias * element_;
    tile.bias = lane.bias;
  }
  tile.first = lane.row_first[0];
  tile.last = lane.row_last[block.rows - 1];
  kernels_.attend(tile, state);
}

void Attention::Write(const Block& block, const State& total) {
  for (int32_t i = 0; i < block.all_rows(); ++i) {
    const QueryRow row = RowOf(block, i);
    float sink = p_.smooth_softmax ? 0.0f : -kInfinity;
    if (p_.head_sink != nullptr) {
      kernels_.widen(p_.dtype, static_cast<const char*>(p_.head_sink) + row.head * element_, &sink, 1);
    }
    kernels_.finish(total, i, p_.head_dim, sink);
    const int64_t to = ((int64_t{block.sequence} * p_.q_len + row.token) * p_.q_heads + row.head) * p_.head_dim;
    kernels_.narrow(p_.dtype, total.out + i * PaddedDim(p_.head_dim), static_cast<char*>(p_.output) + to * element_,
                    p_.head_dim);
  }
}

// Output rows of padding tokens are zero.
void ClearPadding(const GqaParams& p, const std::vector<Lengths>& lengths) {
  const size_t token = ElementSize(p.dtype) * p.q_heads * p.head_dim;
  for (int32_t b = 0; b < p.batch; ++b) {
    const size_t first = static_cast<size_t>(b) * p.q_len + lengths[b].fresh;
    std::memset(static_cast<char*>(p.output) + first * token, 0, (p.q_len - lengths[b].fresh) * token);
  }
}

}  // namespace

void Attend(const GqaParams& params, const std::string& node, const ParallelFor& parallel_for) {
  const std::vector<Lengths> lengths = CheckLengths(params, node);
  const Kernels& kernels = ChosenKernels();
  Append(params, lengths, kernels, parallel_for);
  ClearPadding(params, lengths);
  Attention(params, lengths, kernels).Run(parallel_for);
}

}  // namespace onnx_kv::cpu
