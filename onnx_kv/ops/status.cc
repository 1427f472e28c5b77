#include "onnx_kv/ops/status.h"

namespace onnx_kv {
namespace {
thread_local std::string last_error;
}  // namespace

OnnxKvStatus Fail(OnnxKvStatus status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

}  // namespace onnx_kv

const char* onnx_kv_last_error() { return onnx_kv::last_error.c_str(); }
