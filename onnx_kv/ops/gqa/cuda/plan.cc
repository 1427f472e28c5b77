#include "onnx_kv/ops/gqa/cuda/plan.h"

#include <algorithm>

#include "onnx_kv/ops/status.h"

namespace onnx_kv::cuda {
namespace {

const std::string kFolder = "onnx_kv/ops/gqa/cuda/";

int32_t ElementBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Bytes between two rows of a head in shared memory; kRowPitch of prefill.cu.
int32_t RowPitch(const NodeShape& shape) {
  const int32_t padded = (shape.head_dim + 15) / 16 * 16 * ElementBytes(shape.dtype);
  return (padded / 16 | 1) * 16;
}

Specialisation Specialise(const char* file, const NodeShape& shape, std::vector<std::string> defines) {
  if (shape.head_dim < 32 || shape.head_dim > 256 || shape.head_dim % 8 != 0) {
    throw Error(ONNX_KV_UNSUPPORTED, "head size " + std::to_string(shape.head_dim) +
                                         " is not supported on CUDA; it must be a multiple of 8 from 32 to 256");
  }
  defines.insert(defines.begin(), {"DTYPE=" + std::to_string(static_cast<int>(shape.dtype)),
                                   "HEAD_DIM=" + std::to_string(shape.head_dim)});
  return {kFolder + file, std::move(defines)};
}

std::string Define(const char* name, int32_t value) { return std::string(name) + '=' + std::to_string(value); }

}  // namespace

DecodePlan PlanDecode(const NodeShape& shape, int32_t kv_heads, int32_t batch, const DeviceLimits& limits) {
  constexpr int32_t kTile = 16;
  const bool alone = batch == 1;
  const int32_t row_bytes = shape.head_dim * ElementBytes(shape.dtype);
  const int32_t head_tiles = shape.group > 8 && shape.dtype != DType::kFloat32 ? 2 : 1, heads = 8 * head_tiles;
  // As many warps as the registers of a multiprocessor hold: 16, 12 or 8, in one block or two.
  int32_t warps = 8;
  int32_t blocks = 1;
  if (head_tiles * row_bytes <= 256) {
    warps = row_bytes <= 128 ? 16 : 12;
    blocks = alone ? 1 : 2;
    warps /= blocks;
  }
  const int32_t own = heads * (row_bytes + 64 + warps * 8) + 2 * row_bytes + 1024;  // the kernel's struct Shared
  auto merge_bytes = [&] { return warps * heads * (shape.head_dim + 4) * 4; };
  while (merge_bytes() + own > limits.shared_bytes) warps /= 2;
  DecodePlan plan;
  plan.kernel = {Specialise("decode.cu", shape,
                            {Define("HEAD_TILES", head_tiles), Define("WARPS", warps), Define("BLOCKS", blocks)}),
                 "gqa_decode", static_cast<uint32_t>(32 * warps), static_cast<uint32_t>(merge_bytes())};
  plan.heads = heads;
  plan.places = kv_heads * ((shape.group + heads - 1) / heads);
  plan.unit = warps * kTile;
  const int32_t worthwhile_bytes = alone ? 64 << 10 : 256 << 10;  // of K and V, in a split
  plan.splits = {std::max(1, limits.multiprocessors / plan.places), std::max(1, worthwhile_bytes / (2 * row_bytes))};
  return plan;
}

namespace {

// prefill_hopper.cu: queries, then stages of K and V, from a multiple of 1,024 bytes on.
PrefillPlan PlanHopperPrefill(const NodeShape& shape) {
  constexpr int32_t kRows = 128, kColumns = 128, kThreads = 384;
  const int32_t stages = shape.head_dim == 64 ? 4 : 2;
  const int32_t bytes = (kRows + 2 * stages * kColumns) * shape.head_dim * 2 + 1024;
  PrefillPlan plan;
  plan.attend = {Specialise("prefill_hopper.cu", shape, {Define("COLUMNS", kColumns), Define("STAGES", stages)}),
                 "gqa_prefill", kThreads, static_cast<uint32_t>(bytes)};
  plan.rows = kRows;
  return plan;
}

}  // namespace

PrefillPlan PlanPrefill(const NodeShape& shape, const DeviceLimits& limits) {
  const bool whole_panels = shape.head_dim == 64 || shape.head_dim == 128;
  if (limits.major == 9 && shape.dtype != DType::kFloat32 && whole_panels) return PlanHopperPrefill(shape);
  const bool precise = shape.dtype == DType::kFloat32;
  const int32_t warps = precise ? 2 : 4;
  const int32_t row_blocks = precise || shape.head_dim > 128 ? 1 : 2;
  const int32_t rows = warps * row_blocks * 16;
  int32_t columns = precise || shape.head_dim > 64 ? 32 : 64;
  auto bytes = [&] { return (rows + 4 * columns) * RowPitch(shape); };
  while (bytes() > limits.shared_bytes && columns > 16) columns /= 2;
  PrefillPlan plan;
  plan.attend = {Specialise("prefill.cu", shape,
                            {Define("WARPS", warps), Define("ROW_BLOCKS", row_blocks), Define("COLUMNS", columns)}),
                 "gqa_prefill", static_cast<uint32_t>(32 * warps), static_cast<uint32_t>(bytes())};
  plan.rows = rows;
  return plan;
}

Kernel PlanAppend(const NodeShape& shape) { return {Specialise("append.cu", shape, {}), "gqa_append", 256, 0}; }

Kernel PlanCopyPrefix(const NodeShape& shape) { return {Specialise("append.cu", shape, {}), "gqa_copy_prefix", 256, 0}; }

std::vector<Specialisation> KernelsOf(const NodeShape& shape, const DeviceLimits& limits) {
  return {PlanDecode(shape, 1, 1, limits).kernel.specialisation, PlanDecode(shape, 1, 2, limits).kernel.specialisation,
          PlanPrefill(shape, limits).attend.specialisation, PlanAppend(shape).specialisation};
}

}  // namespace onnx_kv::cuda

OnnxKvStatus onnx_kv_gqa_kernels(int32_t dtype, int32_t head_dim, int32_t group, int32_t shared_bytes, int32_t major,
                                 char* keys, uint64_t capacity) {
  using namespace onnx_kv::cuda;
  return onnx_kv::Guard([&] {
    std::string text;
    const NodeShape shape = {static_cast<onnx_kv::DType>(dtype), head_dim, group};
    for (const Specialisation& kernel : KernelsOf(shape, {132, shared_bytes, major})) text += kernel.Key() + '\n';
    if (text.size() >= capacity) throw onnx_kv::Error(ONNX_KV_INVALID_ARGUMENT, "the buffer for the keys is too small");
    keys[text.copy(keys, capacity - 1)] = '\0';
  });
}
