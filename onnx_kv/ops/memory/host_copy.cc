// Copies within host memory: the host's counterpart of what a CUDA stream does.
#include <cstring>

#include "onnx_kv/ops/capi.h"

OnnxKvStatus onnx_kv_host_move(const OnnxKvMove* moves, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    std::memmove(reinterpret_cast<void*>(moves[i].destination), reinterpret_cast<const void*>(moves[i].source),
                 moves[i].bytes);
  }
  return ONNX_KV_OK;
}

OnnxKvStatus onnx_kv_host_copy_pitched(const OnnxKvPitchedCopy* copies, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    const OnnxKvPitchedCopy& copy = copies[i];
    for (uint64_t row = 0; row < copy.height; ++row) {
      std::memcpy(reinterpret_cast<void*>(copy.destination + row * copy.destination_pitch),
                  reinterpret_cast<const void*>(copy.source + row * copy.source_pitch), copy.width);
    }
  }
  return ONNX_KV_OK;
}
