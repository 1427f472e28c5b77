#include "onnx_kv/ops/gqa/cuda/launch.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "onnx_kv/ops/capi.h"
#include "onnx_kv/ops/cuda/device.h"
#include "onnx_kv/ops/cuda/modules.h"
#include "onnx_kv/ops/gqa/cuda/plan.h"
#include "onnx_kv/ops/gqa/cuda/workspace.h"

namespace onnx_kv::cuda {
namespace {

struct Grid {
  uint32_t x, y, z;
};

uint64_t DivideUp(int64_t value, int64_t by) { return static_cast<uint64_t>((value + by - 1) / by); }

DeviceLimits LimitsOfCurrent() {
  static std::mutex mutex;
  static std::map<CUdevice, DeviceLimits> known;
  CUdevice device;
  CU_CHECK(cuCtxGetDevice, &device);
  std::lock_guard lock(mutex);
  const auto [entry, fresh] = known.try_emplace(device);
  if (fresh) {
    DeviceLimits& limits = entry->second;
    CU_CHECK(cuDeviceGetAttribute, &limits.multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    CU_CHECK(cuDeviceGetAttribute, &limits.major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    CU_CHECK(cuDeviceGetAttribute, &limits.shared_bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device);
  }
  return entry->second;
}

// From sm_90 on a kernel's launch overlaps the end of the one before it; each waits for that one's memory itself.
void Enqueue(const Kernel& kernel, Grid grid, const DeviceLimits& limits, CUstream stream, void** arguments) {
  const CUfunction function = LoadKernel(kernel.specialisation, kernel.entry, kernel.shared_bytes, stream);
  CUlaunchAttribute overlap = {};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config = {};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = kernel.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared_bytes;
  config.hStream = stream;
  if (limits.major >= 9) {
    config.attrs = &overlap;
    config.numAttrs = 1;
  }
  CU_CHECK(cuLaunchKernelEx, &config, function, arguments, nullptr);
}

void LaunchDecode(GqaParams params, NodeShape shape, const DeviceLimits& limits, CUstream stream) {
  DecodePlan plan = PlanDecode(shape, params.kv_heads, params.batch, limits);
  const int32_t longest = (params.present_capacity + plan.unit - 1) / plan.unit;
  const Grid grid = {static_cast<uint32_t>(std::clamp(longest, 1, plan.splits.most)), static_cast<uint32_t>(plan.places),
                     static_cast<uint32_t>(params.batch)};
  const uint64_t rows = static_cast<uint64_t>(plan.places) * params.batch;
  const auto floats = static_cast<uint64_t>(SplitFloats(plan.heads, params.head_dim)) * grid.x * rows;
  Workspace workspace = WorkspaceOf(stream, floats, rows);
  void* arguments[] = {&params, &workspace.results, &workspace.tickets, &shape.group, &plan.splits};
  Enqueue(plan.kernel, grid, limits, stream, arguments);
}

void LaunchPrefill(GqaParams params, const NodeShape& shape, const DeviceLimits& limits, CUstream stream) {
  void* arguments[] = {&params};
  const auto batch = static_cast<uint32_t>(params.batch);
  const Kernel append = PlanAppend(shape);
  const int64_t vectors = static_cast<int64_t>(params.q_len) * params.kv_heads;
  Enqueue(append, {static_cast<uint32_t>(DivideUp(vectors, append.threads / 32)), batch, 1}, limits, stream, arguments);
  const PrefillPlan plan = PlanPrefill(shape, limits);
  const int64_t rows = static_cast<int64_t>(params.q_len) * shape.group;
  Enqueue(plan.attend,
          {static_cast<uint32_t>(params.kv_heads), static_cast<uint32_t>(DivideUp(rows, plan.rows)), batch},
          limits, stream, arguments);
}

void LaunchCopyPrefix(GqaParams params, const NodeShape& shape, const DeviceLimits& limits, CUstream stream) {
  void* arguments[] = {&params};
  Enqueue(PlanCopyPrefix(shape),
          {static_cast<uint32_t>(limits.multiprocessors), static_cast<uint32_t>(params.kv_heads),
           static_cast<uint32_t>(params.batch)},
          limits, stream, arguments);
}

// Kernels move 16 bytes at a time.
void CheckAlignment(const char* what, const void* address, std::initializer_list<int64_t> strides) {
  bool aligned = reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (const int64_t stride : strides) aligned = aligned && stride % 8 == 0;
  if (aligned) return;
  throw Error(ONNX_KV_INVALID_ARGUMENT, std::string(what) + " must lie at a multiple of 16 bytes, with strides of a " +
                                            "multiple of 8 elements, on CUDA");
}

void CheckAlignments(const GqaParams& p) {
  CheckAlignment("query", p.query, {p.query_token_stride});
  CheckAlignment("key", p.key, {p.kv_token_stride});
  CheckAlignment("value", p.value, {p.kv_token_stride});
  CheckAlignment("present_key", p.present_key, {p.present.batch, p.present.head, p.present.seq});
  CheckAlignment("present_value", p.present_value, {p.present.batch, p.present.head, p.present.seq});
  if (p.past_key == nullptr) return;
  CheckAlignment("past_key", p.past_key, {p.past.batch, p.past.head, p.past.seq});
  CheckAlignment("past_value", p.past_value, {p.past.batch, p.past.head, p.past.seq});
}

}  // namespace

void LaunchGqa(const GqaParams& params, CUstream stream) {
  if (params.batch == 0 || params.q_len == 0) return;
  CheckAlignments(params);
  const NodeShape shape = {params.dtype, params.head_dim, params.q_heads / params.kv_heads};
  const DeviceLimits limits = LimitsOfCurrent();
  if (params.past_key != nullptr && params.past_key != params.present_key) {
    LaunchCopyPrefix(params, shape, limits, stream);
  }
  if (params.q_len == 1) {
    LaunchDecode(params, shape, limits, stream);
  } else {
    LaunchPrefill(params, shape, limits, stream);
  }
}

}  // namespace onnx_kv::cuda

OnnxKvStatus onnx_kv_cuda_gqa(int32_t device, void* stream, const void* params) {
  return onnx_kv::Guard([&] {
    onnx_kv::cuda::UseDevice use(device);
    onnx_kv::cuda::LaunchGqa(*static_cast<const onnx_kv::GqaParams*>(params), static_cast<CUstream>(stream));
  });
}
