#include "onnx_kv/ops/abi/node.h"

#include <algorithm>
#include <atomic>

namespace onnx_kv::ort {
namespace {

std::atomic<const Api*> connected = nullptr;

// A name from one of the API's functions that first tell its size, terminating zero included.
template <typename Read>
std::string ReadString(Read&& read) {
  size_t size = 0;
  Check(read(nullptr, &size));
  std::string text(size, '\0');
  Check(read(text.data(), &size));
  text.resize(size == 0 ? 0 : size - 1);
  return text;
}

}  // namespace

Status* Connect(const ApiBase* base) {
  const Api* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    const std::string message =
        std::string("ONNX Runtime ") + base->GetVersionString() + " is too old for onnx_kv; install 1.23 or newer";
    return base->GetApi(1)->CreateStatus(kNotImplemented, message.c_str());
  }
  connected = api;
  return nullptr;
}

const Api& GetApi() { return *connected; }

void Check(Status* status) {
  if (status == nullptr) return;
  const std::string message = GetApi().GetErrorMessage(status);
  GetApi().ReleaseStatus(status);
  throw Error(ONNX_KV_INTERNAL, message);
}

Status* MakeStatus(ErrorCode code, const char* message) { return GetApi().CreateStatus(code, message); }

std::string NodeInfo::name() const {
  return ReadString([&](char* out, size_t* size) { return GetApi().KernelInfo_GetNodeName(info_, out, size); });
}

std::string NodeInfo::input(size_t index) const {
  size_t count = 0;
  Check(GetApi().KernelInfo_GetInputCount(info_, &count));
  if (index >= count) return {};
  return ReadString([&](char* out, size_t* size) { return GetApi().KernelInfo_GetInputName(info_, index, out, size); });
}

std::string NodeInfo::output(size_t index) const {
  size_t count = 0;
  Check(GetApi().KernelInfo_GetOutputCount(info_, &count));
  if (index >= count) return {};
  return ReadString(
      [&](char* out, size_t* size) { return GetApi().KernelInfo_GetOutputName(info_, index, out, size); });
}

// ONNX Runtime reports an attribute that is missing and one of another type by the same code, so the types that are
// not wanted are tried as well.
std::optional<int64_t> NodeInfo::Int(const char* attribute) const {
  int64_t value = 0;
  float other = 0;
  size_t size = 0;
  if (Reads(GetApi().KernelInfoGetAttribute_int64(info_, attribute, &value))) return value;
  if (Reads(GetApi().KernelInfoGetAttribute_float(info_, attribute, &other))) WrongType(attribute, "an integer");
  if (Reads(GetApi().KernelInfoGetAttribute_string(info_, attribute, nullptr, &size))) {
    WrongType(attribute, "an integer");
  }
  return std::nullopt;
}

std::optional<float> NodeInfo::Float(const char* attribute) const {
  float value = 0;
  int64_t other = 0;
  size_t size = 0;
  if (Reads(GetApi().KernelInfoGetAttribute_float(info_, attribute, &value))) return value;
  if (Reads(GetApi().KernelInfoGetAttribute_int64(info_, attribute, &other))) WrongType(attribute, "a float");
  if (Reads(GetApi().KernelInfoGetAttribute_string(info_, attribute, nullptr, &size))) {
    WrongType(attribute, "a float");
  }
  return std::nullopt;
}

std::optional<std::string> NodeInfo::String(const char* attribute) const {
  size_t size = 0;
  if (!Reads(GetApi().KernelInfoGetAttribute_string(info_, attribute, nullptr, &size))) return std::nullopt;
  return ReadString(
      [&](char* out, size_t* bytes) { return GetApi().KernelInfoGetAttribute_string(info_, attribute, out, bytes); });
}

void NodeInfo::WrongType(const char* attribute, const char* wanted) const {
  throw Error(ONNX_KV_INVALID_ARGUMENT, std::string("attribute ") + attribute + " must be " + wanted);
}

bool NodeInfo::Reads(Status* status) const {
  if (status == nullptr) return true;
  GetApi().ReleaseStatus(status);
  return false;
}

std::string Tensor::ShapeText() const {
  std::string text = "[";
  for (size_t i = 0; i < std::min(rank, kMaxRank); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return text + (rank > kMaxRank ? ", …]" : "]");
}

Tensor Call::Input(size_t index) const {
  const Value* value = nullptr;
  Check(GetApi().KernelContext_GetInput(context_, index, &value));
  TensorTypeAndShapeInfo* info = nullptr;
  Check(GetApi().GetTensorTypeAndShape(value, &info));
  Tensor tensor;
  Status* status = GetApi().GetDimensionsCount(info, &tensor.rank);
  if (status == nullptr) {
    status = GetApi().GetDimensions(info, tensor.dims.data(), std::min(tensor.rank, kMaxRank));
  }
  GetApi().ReleaseTensorTypeAndShapeInfo(info);
  Check(status);
  // The only accessor of this API version is the mutable one; inputs are not written through it.
  Check(GetApi().GetTensorMutableData(const_cast<Value*>(value), &tensor.data));
  return tensor;
}

void* Call::Output(size_t index, std::span<const int64_t> dims) const {
  Value* value = nullptr;
  Check(GetApi().KernelContext_GetOutput(context_, index, dims.data(), dims.size(), &value));
  void* data = nullptr;
  Check(GetApi().GetTensorMutableData(value, &data));
  return data;
}

void* Call::GpuStream() const {
  void* stream = nullptr;
  Check(GetApi().KernelContext_GetGPUComputeStream(context_, &stream));
  return stream;
}

void Call::ParallelFor(size_t count, const std::function<void(size_t)>& body) const {
  if (count == 1) body(0);
  if (count <= 1) return;
  const auto run = [](void* data, size_t index) { (*static_cast<const std::function<void(size_t)>*>(data))(index); };
  Check(GetApi().KernelContext_ParallelFor(context_, run, count, 0, const_cast<std::function<void(size_t)>*>(&body)));
}

}  // namespace onnx_kv::ort
