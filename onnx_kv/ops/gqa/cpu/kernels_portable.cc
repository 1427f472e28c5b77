#include "onnx_kv/ops/gqa/cpu/simd_portable.h"
#include "onnx_kv/ops/gqa/cpu/tile.h"

namespace onnx_kv::cpu {
const Kernels kPortableKernels = MakeKernels("portable");
}  // namespace onnx_kv::cpu
