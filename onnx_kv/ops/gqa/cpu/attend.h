// GroupQueryAttention on the CPU.
//
// An output row depends on its query, the live prefix of its sequence and nothing else: keys are taken in tiles of
// kTileKeys at fixed absolute positions, each tile is summed in a fixed order, and tiles are merged first to last. So
// results are equal bit for bit whatever the layout, the batch around a sequence, the way a prompt was cut into calls
// and the number of threads. (They differ between instruction sets.)
#pragma once

#include <functional>
#include <string>

#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv::cpu {

// Runs body(0) … body(count - 1), each once, in any order and on any thread, and returns when all are done.
using ParallelFor = std::function<void(size_t count, const std::function<void(size_t)>& body)>;

// One call. Throws Error (INVALID_ARGUMENT), naming `node`, for lengths or positions out of range, before anything is
// written. Memory beyond the live prefix of a cache is not touched.
void Attend(const GqaParams& params, const std::string& node, const ParallelFor& parallel_for);

}  // namespace onnx_kv::cpu
