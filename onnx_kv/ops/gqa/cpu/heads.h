// What happens to one head of one new token before attention: RMS norm, then rotary embedding.
#pragma once

#include "onnx_kv/ops/gqa/cpu/kernels.h"
#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv::cpu {

class HeadTransform {
 public:
  HeadTransform(const GqaParams& params, const Kernels& kernels) : p_(params), kernels_(kernels) {}

  // Position of query row `s` of sequence `b`, of which `past` tokens were cached before.
  int64_t Position(int32_t b, int32_t s, int32_t past) const {
    return p_.position_ids != nullptr ? p_.position_ids[int64_t{b} * p_.q_len + s] : int64_t{past} + s;
  }

  // Transforms `head` in place; `scratch` has room for head_dim floats.
  void Query(float* head, int64_t position, float* scratch) const {
    Normalize(head, p_.q_norm_weight, p_.q_norm_epsilon, scratch);
    Rotate(head, position, scratch);
  }
  void Key(float* head, int64_t position, float* scratch) const {
    Normalize(head, p_.k_norm_weight, p_.k_norm_epsilon, scratch);
    Rotate(head, position, scratch);
  }

 private:
  void Normalize(float* head, const void* weight, float epsilon, float* scratch) const;
  void Rotate(float* head, int64_t position, float* scratch) const;

  const GqaParams& p_;
  const Kernels& kernels_;
};

}  // namespace onnx_kv::cpu
