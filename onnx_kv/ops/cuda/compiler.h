// Compiles the embedded CUDA sources for a device with NVRTC: to machine code, so that a driver older than NVRTC runs it.
//
// A kernel file is specialised by preprocessor constants. Its includes are other embedded files; no CUDA header is needed
// at run time.
#pragma once

#include <string>
#include <vector>

namespace onnx_kv::cuda {

// One kernel file with the constants it is compiled with.
struct Specialisation {
  std::string file;                  // an embedded source, e.g. "onnx_kv/ops/gqa/cuda/decode.cu"
  std::vector<std::string> defines;  // e.g. "HEAD_DIM=128"

  // Readable and unique: "onnx_kv/ops/gqa/cuda/decode.cu HEAD_DIM=128 …".
  std::string Key() const;
  static Specialisation Parse(const std::string& key);
};

struct Cubin {
  std::vector<char> image;
  std::string log;  // the assembler's report of every kernel: registers, stack, spills
};

// `arch` is NVRTC's name of the architecture, e.g. "sm_90a". Throws Error: a source does not compile (the message is the
// compiler's own), NVRTC is missing or does not know `arch`.
Cubin Compile(const Specialisation& specialisation, const std::string& arch);

// The same machine code, from the disk cache where it is there (disk_cache.h); compiled and kept there otherwise.
std::vector<char> CompileCached(const Specialisation& specialisation, const std::string& arch);

// "sm_90a" for compute capability 9.0: features of one architecture only where our kernels have a path for it.
std::string ArchName(int major, int minor);

}  // namespace onnx_kv::cuda
