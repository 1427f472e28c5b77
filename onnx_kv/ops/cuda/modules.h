// Kernels of the embedded sources, compiled for and loaded into the current context, once a process.
#pragma once

#include "onnx_kv/ops/cuda/compiler.h"
#include "onnx_kv/ops/cuda/driver.h"

namespace onnx_kv::cuda {

// The kernel `entry` (an extern "C" name) of `specialisation` in the context that is current on this thread. The first
// call for a context compiles and loads, which may not happen while `stream` is being captured: throws Error
// (ONNX_KV_UNSUPPORTED) then. A kernel may use up to `shared_bytes` of dynamic shared memory.
CUfunction LoadKernel(const Specialisation& specialisation, const char* entry, unsigned shared_bytes, CUstream stream);

// Throws Error (ONNX_KV_UNSUPPORTED) if `stream` is being captured; `what` says what needs a first run outside.
void RefuseInCapture(CUstream stream, const std::string& what);

}  // namespace onnx_kv::cuda
