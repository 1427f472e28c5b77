// Device memory that decode's splits meet in: one for every stream, since a stream's calls never overlap.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace onnx_kv::cuda {

struct Workspace {
  CUdeviceptr results;  // floats
  CUdeviceptr tickets;  // uint32, zero between launches
};

// The stream's workspace, with room for at least this much. It grows outside captures only: throws Error
// (ONNX_KV_UNSUPPORTED) where a capture is the first to need it. What it outgrew stays, for the graphs that hold it.
Workspace WorkspaceOf(CUstream stream, uint64_t floats, uint64_t tickets);

}  // namespace onnx_kv::cuda
