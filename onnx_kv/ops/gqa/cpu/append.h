// Brings the present up to date before anything reads it.
#pragma once

#include <vector>

#include "onnx_kv/ops/gqa/cpu/attend.h"
#include "onnx_kv/ops/gqa/cpu/kernels.h"
#include "onnx_kv/ops/gqa/cpu/lengths.h"

namespace onnx_kv::cpu {

// Copies the live prefix of the past where it has a buffer of its own, then appends the call's new keys (normalised and
// rotated) and values.
void Append(const GqaParams& params, const std::vector<Lengths>& lengths, const Kernels& kernels,
            const ParallelFor& parallel_for);

}  // namespace onnx_kv::cpu
