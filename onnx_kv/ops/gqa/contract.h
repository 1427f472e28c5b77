// The operator's input contract: shapes are checked against the node, outputs are allocated, and what a kernel needs is
// gathered. Values of device tensors are never read here, so that the same checks serve the CUDA provider; lengths
// and positions are checked by the CPU kernels, and clamped by the CUDA kernels.
#pragma once

#include "onnx_kv/ops/abi/node.h"
#include "onnx_kv/ops/gqa/node.h"
#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv {

// Throws Error (INVALID_ARGUMENT) that names the node, the input and both shapes.
GqaParams CheckCall(const GqaNode& node, const ort::Call& call);

}  // namespace onnx_kv
