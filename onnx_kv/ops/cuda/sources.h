// The CUDA sources and the headers they share with the host, embedded in the library by the build, under their paths in the repository.
#pragma once

#include <string_view>
#include <vector>

namespace onnx_kv::cuda {

struct Source {
  const char* path;  // e.g. "onnx_kv/ops/gqa/cuda/decode.cu"
  const char* text;
};

// All of them, ordered by path. Defined in a file that CMake writes (cmake/embed_sources.cmake).
const std::vector<Source>& Sources();

// The one whose path is `path`. Throws Error (ONNX_KV_INVALID_ARGUMENT) where there is none.
const Source& FindSource(std::string_view path);

}  // namespace onnx_kv::cuda
