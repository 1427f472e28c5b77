// Compiled with -mavx512f -mavx512bw -mavx512vl.
#if defined(__x86_64__)
#include "onnx_kv/ops/gqa/cpu/simd_avx512.h"
#include "onnx_kv/ops/gqa/cpu/tile.h"

namespace onnx_kv::cpu {
const Kernels kAvx512Kernels = MakeKernels("avx512");
}  // namespace onnx_kv::cpu
#endif
