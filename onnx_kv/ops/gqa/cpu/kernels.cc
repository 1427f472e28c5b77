#include "onnx_kv/ops/gqa/cpu/kernels.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "onnx_kv/ops/status.h"

namespace onnx_kv::cpu {
namespace {

// Those that this processor can run, the one to choose first. AVX-512 has to be asked for: no processor that has it has run
// all of the tests yet.
std::vector<const Kernels*> Usable() {
  std::vector<const Kernels*> usable;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    usable.push_back(&kAvx2Kernels);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    usable.push_back(&kAvx512Kernels);
  }
#endif
  usable.push_back(&kPortableKernels);
  return usable;
}

const Kernels& Choose() {
  const std::vector<const Kernels*> usable = Usable();
  const char* wanted = std::getenv("ONNX_KV_CPU_KERNELS");
  if (wanted == nullptr) return *usable.front();
  std::string names;
  for (const Kernels* kernels : usable) {
    if (std::string_view(wanted) == kernels->name) return *kernels;
    names += std::string(names.empty() ? "" : ", ") + kernels->name;
  }
  throw Error(ONNX_KV_INVALID_ARGUMENT,
              std::string("ONNX_KV_CPU_KERNELS is ") + wanted + ", but this processor can run: " + names);
}

}  // namespace

const Kernels& ChosenKernels() {
  static const Kernels& chosen = Choose();
  return chosen;
}

}  // namespace onnx_kv::cpu
