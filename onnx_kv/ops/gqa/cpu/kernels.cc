#include "onnx_kv/ops/gqa/cpu/kernels.h"

#include <cstdlib>
#include <string_view>

namespace onnx_kv::cpu {
namespace {

const Kernels& Choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return kAvx512Kernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return kAvx2Kernels;
  }
#endif
  return kPortableKernels;
}

}  // namespace

const Kernels& BestKernels() {
  static const Kernels& best = Choose();
  return best;
}

}  // namespace onnx_kv::cpu
