#include "onnx_kv/ops/gqa/cpu/append.h"

#include <cstring>

#include "onnx_kv/ops/gqa/cpu/heads.h"

namespace onnx_kv::cpu {
namespace {

constexpr int32_t kTokensPerTask = 16;

// One of a cache's KV heads' worth of the live prefix: a stripe of its own where heads are outermost, else an equal
// share of the tokens. Only these two layouts have a past of its own.
void CopyPrefixShare(const GqaParams& p, const void* from, void* to, int32_t b, int32_t n, int32_t tokens) {
  const size_t element = ElementSize(p.dtype);
  int64_t source = b * p.past.batch;
  int64_t target = b * p.present.batch;
  int64_t count = 0;
  if (p.present.seq == p.head_dim) {
    source += n * p.past.head;
    target += n * p.present.head;
    count = int64_t{tokens} * p.head_dim;
  } else {
    const int64_t begin = int64_t{tokens} * n / p.kv_heads;
    const int64_t end = int64_t{tokens} * (n + 1) / p.kv_heads;
    source += begin * p.past.seq;
    target += begin * p.present.seq;
    count = (end - begin) * p.present.seq;
  }
  std::memcpy(static_cast<char*>(to) + target * element, static_cast<const char*>(from) + source * element,
              static_cast<size_t>(count) * element);
}

void CopyPast(const GqaParams& p, const std::vector<Lengths>& lengths, const ParallelFor& parallel_for) {
  const size_t heads = p.kv_heads;
  parallel_for(lengths.size() * heads, [&](size_t task) {
    const auto b = static_cast<int32_t>(task / heads);
    const auto n = static_cast<int32_t>(task % heads);
    CopyPrefixShare(p, p.past_key, p.present_key, b, n, lengths[b].past());
    CopyPrefixShare(p, p.past_value, p.present_value, b, n, lengths[b].past());
  });
}

void AppendToken(const GqaParams& p, const Kernels& kernels, int32_t b, int32_t s, int32_t past, float* head,
                 float* scratch) {
  const HeadTransform transform(p, kernels);
  const size_t element = ElementSize(p.dtype);
  const bool copy_key = p.cos_cache == nullptr && p.k_norm_weight == nullptr;
  for (int32_t n = 0; n < p.kv_heads; ++n) {
    const int64_t from = (int64_t{b} * p.q_len + s) * p.kv_token_stride + int64_t{n} * p.head_dim;
    const int64_t to = b * p.present.batch + n * p.present.head + (int64_t{past} + s) * p.present.seq;
    const char* key = static_cast<const char*>(p.key) + from * element;
    char* present_key = static_cast<char*>(p.present_key) + to * element;
    std::memcpy(static_cast<char*>(p.present_value) + to * element, static_cast<const char*>(p.value) + from * element,
                p.head_dim * element);
    if (copy_key) {
      std::memcpy(present_key, key, p.head_dim * element);
      continue;
    }
    kernels.widen(p.dtype, key, head, p.head_dim);
    transform.Key(head, transform.Position(b, s, past), scratch);
    kernels.narrow(p.dtype, head, present_key, p.head_dim);
  }
}

}  // namespace

void Append(const GqaParams& params, const std::vector<Lengths>& lengths, const Kernels& kernels,
            const ParallelFor& parallel_for) {
  const bool copies = params.past_key != nullptr && params.past_key != params.present_key;
  if (copies) CopyPast(params, lengths, parallel_for);

  const size_t tasks_per_row = (params.q_len + kTokensPerTask - 1) / kTokensPerTask;
  const size_t tasks = lengths.size() * tasks_per_row;
  std::vector<float> scratch(tasks * 2 * params.head_dim);
  parallel_for(tasks, [&](size_t task) {
    const auto b = static_cast<int32_t>(task / tasks_per_row);
    const auto begin = static_cast<int32_t>(task % tasks_per_row) * kTokensPerTask;
    float* head = scratch.data() + task * 2 * params.head_dim;
    for (int32_t s = begin; s < begin + kTokensPerTask && s < lengths[b].fresh; ++s) {
      AppendToken(params, kernels, b, s, lengths[b].past(), head, head + params.head_dim);
    }
  });
}

}  // namespace onnx_kv::cpu
