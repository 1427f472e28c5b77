// The operators that ONNX Runtime is given: GroupQueryAttention for every provider and element type that we have
// kernels for. Of the same domain and name as ONNX Runtime's own, they serve every such node of a session that loads
// the library.
#pragma once

#include <span>

#include "onnx_kv/ops/abi/ort.h"

namespace onnx_kv {

std::span<const ort::CustomOp* const> GqaOps();

}  // namespace onnx_kv
