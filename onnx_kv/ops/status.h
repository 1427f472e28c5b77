// Errors inside the op library: an exception with a status, caught where C begins (Guard).
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "onnx_kv/ops/capi.h"

namespace onnx_kv {

class Error : public std::runtime_error {
 public:
  Error(OnnxKvStatus status, const std::string& message) : std::runtime_error(message), status_(status) {}
  OnnxKvStatus status() const { return status_; }

 private:
  OnnxKvStatus status_;
};

// Keeps `message` for onnx_kv_last_error() on this thread and returns `status`.
OnnxKvStatus Fail(OnnxKvStatus status, const char* message) noexcept;

// Runs `body` and turns what it throws into a status.
template <typename Body>
OnnxKvStatus Guard(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return ONNX_KV_OK;
  } catch (const Error& error) {
    return Fail(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return Fail(ONNX_KV_OUT_OF_MEMORY, "the host has no memory left");
  } catch (const std::exception& error) {
    return Fail(ONNX_KV_INTERNAL, error.what());
  }
}

}  // namespace onnx_kv
