// The flat C interface that Python loads with ctypes. Every function that can fail returns a Status and leaves a
// message for onnx_kv_last_error(); no exception crosses this boundary.
#pragma once

#include <cstddef>
#include <cstdint>

#define ONNX_KV_EXPORT extern "C" __attribute__((visibility("default")))

// The numbers are onnx_kv/_native.py's, which turns each into its typed error.
enum OnnxKvStatus : int32_t {
  ONNX_KV_OK = 0,
  ONNX_KV_INVALID_ARGUMENT = 1,
  ONNX_KV_OUT_OF_MEMORY = 2,
  ONNX_KV_DRIVER_ERROR = 3,
  ONNX_KV_UNSUPPORTED = 4,
  ONNX_KV_INTERNAL = 5,
};

// The message of this thread's last failed call; empty if there was none. Valid until the thread's next call.
ONNX_KV_EXPORT const char* onnx_kv_last_error();
