// Compiled with -mavx2 -mfma -mf16c.
#if defined(__x86_64__)
#include "onnx_kv/ops/gqa/cpu/simd_avx2.h"
#include "onnx_kv/ops/gqa/cpu/tile.h"

namespace onnx_kv::cpu {
const Kernels kAvx2Kernels = MakeKernels("avx2");
}  // namespace onnx_kv::cpu
#endif
