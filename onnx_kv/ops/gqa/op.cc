#include "onnx_kv/ops/gqa/op.h"

#include "onnx_kv/ops/gqa/contract.h"
#include "onnx_kv/ops/gqa/cpu/attend.h"
#include "onnx_kv/ops/gqa/cuda/launch.h"
#include "onnx_kv/ops/gqa/node.h"

namespace onnx_kv {
namespace {

using Run = void (*)(const GqaNode& node, const ort::Call& call);

struct GqaOp : ort::CustomOp {
  GqaOp(const char* op_provider, DType op_dtype, Run op_run);

  const char* provider;
  DType dtype;
  Run run;
};

struct Kernel {
  GqaNode node;
  Run run;
};

const GqaOp& Self(const ort::CustomOp* op) { return *static_cast<const GqaOp*>(op); }

ort::ElementType FloatType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ort::kFloat;
    case DType::kFloat16:
      return ort::kFloat16;
    case DType::kBFloat16:
      return ort::kBFloat16;
  }
  return ort::kFloat;
}

ort::ElementType InputType(const ort::CustomOp* op, size_t slot) {
  switch (slot) {
    case kSeqlensK:
    case kTotalSequenceLength:
    case kQuerySeqlens:
      return ort::kInt32;
    case kPositionIds:
      return ort::kInt64;
    case kKScale:
    case kVScale:
      return ort::kFloat;
    default:
      return FloatType(Self(op).dtype);
  }
}

ort::Characteristic InputKind(const ort::CustomOp*, size_t slot) {
  return slot == kQuery || slot == kSeqlensK || slot == kTotalSequenceLength ? ort::kRequired : ort::kOptional;
}

ort::Status* MakeKernel(const ort::CustomOp* op, const ort::Api*, const ort::KernelInfo* info, void** kernel) {
  return ort::AsStatus([&] { *kernel = new Kernel{ReadNode(ort::NodeInfo(info), Self(op).dtype), Self(op).run}; });
}

ort::Status* RunKernel(void* kernel, ort::KernelContext* context) {
  return ort::AsStatus([&] {
    const auto& self = *static_cast<const Kernel*>(kernel);
    self.run(self.node, ort::Call(context));
  });
}

// No shape inference function is set: ONNX Runtime 1.23 reads through a null pointer before it calls one where a node
// leaves an optional input out, as most do.
GqaOp::GqaOp(const char* op_provider, DType op_dtype, Run op_run)
    : CustomOp{}, provider(op_provider), dtype(op_dtype), run(op_run) {
  version = ort::kApiVersion;
  GetName = [](const CustomOp*) { return "GroupQueryAttention"; };
  GetExecutionProviderType = [](const CustomOp* op) { return Self(op).provider; };
  GetInputType = InputType;
  GetInputTypeCount = [](const CustomOp*) -> size_t { return kInputCount; };
  GetOutputType = [](const CustomOp* op, size_t) { return FloatType(Self(op).dtype); };
  GetOutputTypeCount = [](const CustomOp*) -> size_t { return kOutputCount; };
  GetInputCharacteristic = InputKind;
  GetOutputCharacteristic = [](const CustomOp*, size_t slot) {
    return slot == kOutput ? ort::kRequired : ort::kOptional;
  };
  // The CPU provider has all its inputs on the host; elsewhere this one stays there too, since it sizes the present.
  GetInputMemoryType = [](const CustomOp*, size_t slot) {
    return slot == kTotalSequenceLength ? ort::kCpuInput : ort::kDefault;
  };
  CreateKernelV2 = MakeKernel;
  KernelComputeV2 = RunKernel;
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

void RunCpu(const GqaNode& node, const ort::Call& call) {
  const GqaParams params = CheckCall(node, call);
  cpu::Attend(params, node.name,
              [&](size_t count, const std::function<void(size_t)>& body) { call.ParallelFor(count, body); });
}

void RunCuda(const GqaNode& node, const ort::Call& call) {
  cuda::LaunchGqa(CheckCall(node, call), static_cast<CUstream>(call.GpuStream()));
}

constexpr const char* kCpu = "CPUExecutionProvider";
constexpr const char* kCuda = "CUDAExecutionProvider";

}  // namespace

std::span<const ort::CustomOp* const> GqaOps() {
  static const GqaOp kernels[] = {
      {kCpu, DType::kFloat32, RunCpu},   {kCpu, DType::kFloat16, RunCpu},   {kCpu, DType::kBFloat16, RunCpu},
      {kCuda, DType::kFloat32, RunCuda}, {kCuda, DType::kFloat16, RunCuda}, {kCuda, DType::kBFloat16, RunCuda},
  };
  static const ort::CustomOp* const ops[] = {&kernels[0], &kernels[1], &kernels[2],
                                             &kernels[3], &kernels[4], &kernels[5]};
  return ops;
}

}  // namespace onnx_kv
