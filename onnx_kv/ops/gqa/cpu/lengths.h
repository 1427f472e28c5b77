// The lengths of a call's sequences, read and checked on the host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv::cpu {

struct Lengths {
  int32_t total;  // tokens in the cache after the call
  int32_t fresh;  // of them new in this call
  int32_t past() const { return total - fresh; }
};

// One entry a sequence. Throws Error (INVALID_ARGUMENT), naming `node` and the input, where a length does not fit the
// caches or the bias, or a position does not fit the cos and sin caches.
std::vector<Lengths> CheckLengths(const GqaParams& params, const std::string& node);

}  // namespace onnx_kv::cpu
