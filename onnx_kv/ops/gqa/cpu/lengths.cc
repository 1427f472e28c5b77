#include "onnx_kv/ops/gqa/cpu/lengths.h"

#include <algorithm>

#include "onnx_kv/ops/status.h"

namespace onnx_kv::cpu {
namespace {

[[noreturn]] void Invalid(const std::string& node, const char* input, int32_t b, int64_t value,
                          const std::string& problem) {
  throw Error(ONNX_KV_INVALID_ARGUMENT, "GroupQueryAttention node '" + node + "': " + input + " of sequence " +
                                            std::to_string(b) + " is " + std::to_string(value) + ", " + problem);
}

Lengths LengthsOf(const GqaParams& p, const std::string& node, int32_t b) {
  const int64_t total = int64_t{p.seqlens_k[b]} + 1;
  if (total < 1 || total > p.present_capacity) {
    Invalid(node, "seqlens_k", b, p.seqlens_k[b],
            "but present_key has room for " + std::to_string(p.present_capacity) + " tokens");
  }
  const int64_t most = std::min<int64_t>(p.q_len, total);
  const int64_t fresh = p.query_seqlens == nullptr ? most : p.query_seqlens[b];
  if (fresh < 0 || fresh > most) {
    Invalid(node, "query_seqlens", b, fresh, "expected 0 to " + std::to_string(most));
  }
  if (total - fresh > p.past_capacity) {
    Invalid(node, "seqlens_k", b, p.seqlens_k[b],
            "which leaves " + std::to_string(total - fresh) + " tokens to past_key, which has room for " +
                std::to_string(p.past_capacity));
  }
  if (p.attention_bias != nullptr && total > p.bias_row_stride) {
    Invalid(node, "seqlens_k", b, p.seqlens_k[b],
            "but attention_bias ends after " + std::to_string(p.bias_row_stride) + " tokens");
  }
  return {static_cast<int32_t>(total), static_cast<int32_t>(fresh)};
}

void CheckPositions(const GqaParams& p, const std::string& node, int32_t b, const Lengths& row) {
  const auto check = [&](const char* input, int64_t position) {
    if (position < 0 || position >= p.rotary_rows) {
      Invalid(node, input, b, position, "but cos_cache has " + std::to_string(p.rotary_rows) + " rows");
    }
  };
  if (row.fresh == 0) return;
  if (p.position_ids == nullptr) {
    check("the last position", row.total - 1);
    return;
  }
  for (int32_t s = 0; s < row.fresh; ++s) check("position_ids", p.position_ids[int64_t{b} * p.q_len + s]);
}

}  // namespace

std::vector<Lengths> CheckLengths(const GqaParams& params, const std::string& node) {
  std::vector<Lengths> lengths;
  lengths.reserve(params.batch);
  for (int32_t b = 0; b < params.batch; ++b) {
    lengths.push_back(LengthsOf(params, node, b));
    if (params.cos_cache != nullptr) CheckPositions(params, node, b, lengths.back());
  }
  return lengths;
}

}  // namespace onnx_kv::cpu
