// A GroupQueryAttention node: its attributes and which of its inputs are connected, read once when the kernel is made.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "onnx_kv/ops/abi/node.h"
#include "onnx_kv/ops/gqa/params.h"

namespace onnx_kv {

// Slots of the operator's inputs.
enum GqaInput : size_t {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kSeqlensK,
  kTotalSequenceLength,
  kCosCache,
  kSinCache,
  kPositionIds,
  kAttentionBias,
  kHeadSink,
  kKScale,
  kVScale,
  kQNormWeight,
  kKNormWeight,
  kQuerySeqlens,
  kInputCount
};

// Slots of its outputs.
enum GqaOutput : size_t { kOutput, kPresentKey, kPresentValue, kOutputQk, kOutputCount };

// The name of an input, as in the operator's documentation.
const char* InputName(size_t slot);

struct GqaNode {
  std::string name;
  DType dtype;
  int32_t q_heads;
  int32_t kv_heads;
  float scale;  // 0: 1/sqrt(head_dim)
  float softcap;
  int32_t window;
  bool rotary;
  bool rotary_interleaved;
  bool smooth_softmax;
  float q_norm_epsilon;
  float k_norm_epsilon;
  KvLayout layout;
  int64_t token_stride;  // 0 unless the layout is interleaved
  std::array<bool, kInputCount> has;

  bool interleaved() const { return layout == KvLayout::kPaired || layout == KvLayout::kTokenMajor; }
};

// Reads and checks a node. Throws Error, naming the node and the attribute, input or output at fault, for everything
// that the kernels cannot do.
GqaNode ReadNode(const ort::NodeInfo& info, DType dtype);

}  // namespace onnx_kv
