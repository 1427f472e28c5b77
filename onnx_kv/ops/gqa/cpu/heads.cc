#include "onnx_kv/ops/gqa/cpu/heads.h"

#include <cmath>

namespace onnx_kv::cpu {

void HeadTransform::Normalize(float* head, const void* weight, float epsilon, float* scratch) const {
  if (weight == nullptr) return;
  kernels_.widen(p_.dtype, weight, scratch, p_.head_dim);
  float squares = 0;
  for (int d = 0; d < p_.head_dim; ++d) squares += head[d] * head[d];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(p_.head_dim) + epsilon);
  for (int d = 0; d < p_.head_dim; ++d) head[d] = head[d] * factor * scratch[d];
}

void HeadTransform::Rotate(float* head, int64_t position, float* scratch) const {
  if (p_.cos_cache == nullptr) return;
  const int half = p_.rotary_dim / 2;
  float* cos = scratch;
  float* sin = scratch + half;
  const auto row = [&](const void* cache) {
    return static_cast<const char*>(cache) + ElementSize(p_.dtype) * static_cast<size_t>(position * half);
  };
  kernels_.widen(p_.dtype, row(p_.cos_cache), cos, half);
  kernels_.widen(p_.dtype, row(p_.sin_cache), sin, half);
  const int step = p_.rotary_interleaved ? 2 : 1;
  const int partner = p_.rotary_interleaved ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float first = head[i * step];
    const float second = head[i * step + partner];
    head[i * step] = first * cos[i] - second * sin[i];
    head[i * step + partner] = second * cos[i] + first * sin[i];
  }
}

}  // namespace onnx_kv::cpu
