// What a custom operator sees of its node, as C++: attributes and port names when the kernel is created, tensors and
// the thread pool when it runs. Everything here throws onnx_kv::Error; AsStatus() ends that where ONNX Runtime calls.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "onnx_kv/ops/abi/ort.h"
#include "onnx_kv/ops/status.h"

namespace onnx_kv::ort {

// Finds the API in `base`. Fails where the running ONNX Runtime is older than the oldest that we support.
Status* Connect(const ApiBase* base);

// The API that Connect() found.
const Api& GetApi();

// Throws the message of `status` and releases it, unless it is success.
void Check(Status* status);

// A new Status with `message`.
Status* MakeStatus(ErrorCode code, const char* message);

// Runs `body` and turns what it throws into a Status; nullptr is success.
template <typename Body>
Status* AsStatus(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return nullptr;
  } catch (const Error& error) {
    const bool argument = error.status() == ONNX_KV_INVALID_ARGUMENT;
    const bool missing = error.status() == ONNX_KV_UNSUPPORTED;
    return MakeStatus(argument ? kInvalidArgument : missing ? kNotImplemented : kRuntimeException, error.what());
  } catch (const std::exception& error) {
    return MakeStatus(kRuntimeException, error.what());
  }
}

// A node while its kernel is created.
class NodeInfo {
 public:
  explicit NodeInfo(const KernelInfo* info) : info_(info) {}

  std::string name() const;
  // The value at a port, empty where an optional one is not connected.
  std::string input(size_t index) const;
  std::string output(size_t index) const;

  // nullopt where the node lacks the attribute; throws where it has another type.
  std::optional<int64_t> Int(const char* attribute) const;
  std::optional<float> Float(const char* attribute) const;
  std::optional<std::string> String(const char* attribute) const;

 private:
  [[noreturn]] void WrongType(const char* attribute, const char* wanted) const;
  bool Reads(Status* status) const;

  const KernelInfo* info_;
};

inline constexpr size_t kMaxRank = 4;

// A tensor's address and shape. `rank` may exceed kMaxRank, the dimensions beyond are not kept.
struct Tensor {
  void* data = nullptr;
  size_t rank = 0;
  std::array<int64_t, kMaxRank> dims{};

  // "[1, 8, 64]"
  std::string ShapeText() const;
};

// One call.
class Call {
 public:
  explicit Call(KernelContext* context) : context_(context) {}

  Tensor Input(size_t index) const;
  // The output with this shape, allocated by ONNX Runtime unless the caller bound one.
  void* Output(size_t index, std::span<const int64_t> dims) const;
  // The CUDA stream that the provider runs this call on.
  void* GpuStream() const;
  // Runs body(0) … body(count - 1), each once, on the session's intra-op threads. `body` must not throw.
  void ParallelFor(size_t count, const std::function<void(size_t)>& body) const;

 private:
  KernelContext* context_;
};

}  // namespace onnx_kv::ort
