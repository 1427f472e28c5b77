#include "onnx_kv/ops/gqa/node.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace onnx_kv {
namespace {

class Reader {
 public:
  // A node without a name is known by its first output.
  explicit Reader(const ort::NodeInfo& info) : info_(info), name_(info.name()) {
    if (name_.empty()) name_ = info.output(kOutput);
  }

  const std::string& name() const { return name_; }

  [[noreturn]] void Invalid(const std::string& problem) const {
    throw Error(ONNX_KV_INVALID_ARGUMENT, "GroupQueryAttention node '" + name_ + "': " + problem);
  }

  [[noreturn]] void Refuse(const std::string& problem) const {
    throw Error(ONNX_KV_UNSUPPORTED, "GroupQueryAttention node '" + name_ + "': " + problem);
  }

  // Puts the node's name before the message of a failed read.
  template <typename Read>
  auto Named(Read&& read) const {
    try {
      return read();
    } catch (const Error& error) {
      Invalid(error.what());
    }
  }

  int64_t Int(const char* attribute, int64_t fallback) const {
    return Named([&] { return info_.Int(attribute); }).value_or(fallback);
  }

  int32_t Positive(const char* attribute) const {
    const int64_t value = Int(attribute, 0);
    if (value < 1 || value > std::numeric_limits<int32_t>::max()) {
      Invalid(std::string("attribute ") + attribute + " must be a positive number");
    }
    return static_cast<int32_t>(value);
  }

  bool Flag(const char* attribute) const {
    const int64_t value = Int(attribute, 0);
    if (value != 0 && value != 1) Invalid(std::string("attribute ") + attribute + " must be 0 or 1");
    return value == 1;
  }

  float Float(const char* attribute, float fallback) const {
    const float value = Named([&] { return info_.Float(attribute); }).value_or(fallback);
    if (!std::isfinite(value)) Invalid(std::string("attribute ") + attribute + " is not a finite number");
    return value;
  }

  std::string String(const char* attribute, const char* fallback) const {
    return info_.String(attribute).value_or(fallback);
  }

 private:
  const ort::NodeInfo& info_;
  std::string name_;
};

void ReadLayout(const Reader& reader, GqaNode& node) {
  const int64_t layout = reader.Int("kv_layout", 0);
  if (layout < 0 || layout > static_cast<int64_t>(KvLayout::kTokenMajor)) {
    reader.Refuse("attribute kv_layout is " + std::to_string(layout) +
                  "; this library knows 0 (head-major), 1 (seq-major), 2 (paired) and 3 (token-major)");
  }
  node.layout = static_cast<KvLayout>(layout);
  node.token_stride = node.interleaved() ? reader.Positive("kv_token_stride") : 0;
}

// Attributes of GroupQueryAttention that change the result and that no kernel here implements.
void RefuseAttributes(const Reader& reader) {
  if (reader.Flag("sliding_window_cache")) {
    reader.Refuse(
        "attribute sliding_window_cache=1 keeps only the window in the cache; patch the model with onnx-kv, which "
        "clears it and gives the layer its full address range");
  }
  if (reader.Int("causal", 1) != 1) reader.Refuse("attribute causal=0: bidirectional attention is not supported");
  if (reader.Int("qk_output", 0) != 0) reader.Refuse("attribute qk_output: the scores cannot be returned");
  if (reader.Int("kv_cache_bit_width", 0) != 0) {
    reader.Refuse("attribute kv_cache_bit_width: a quantised cache is not supported");
  }
  for (const char* attribute : {"k_quant_type", "v_quant_type"}) {
    if (reader.String(attribute, "NONE") != "NONE") {
      reader.Refuse(std::string("attribute ") + attribute + ": a quantised cache is not supported");
    }
  }
}

void CheckPorts(const Reader& reader, const ort::NodeInfo& info, const GqaNode& node) {
  for (size_t slot : {kKScale, kVScale}) {
    if (node.has[slot]) {
      reader.Refuse(std::string("input ") + InputName(slot) + ": a quantised cache is not supported");
    }
  }
  if (!info.output(kOutputQk).empty()) reader.Refuse("output output_qk: the scores cannot be returned");
  if (info.output(kPresentKey).empty() || info.output(kPresentValue).empty()) {
    reader.Refuse("outputs present_key and present_value: attention without a cache is not supported");
  }
  const auto together = [&](size_t first, size_t second) {
    if (node.has[first] != node.has[second]) {
      reader.Invalid(std::string("inputs ") + InputName(first) + " and " + InputName(second) + " belong together");
    }
  };
  together(kKey, kValue);
  together(kPastKey, kPastValue);
  together(kCosCache, kSinCache);
  together(kQNormWeight, kKNormWeight);
  if (node.rotary && !node.has[kCosCache]) {
    reader.Invalid("attribute do_rotary=1 needs the inputs cos_cache and sin_cache");
  }
  if (node.interleaved() && !node.has[kPastKey]) {
    reader.Refuse(
        "attribute kv_layout: an interleaved layout needs past_key and past_value, bound where the present is");
  }
}

}  // namespace

const char* InputName(size_t slot) {
  static constexpr const char* kNames[kInputCount] = {"query",
                                                      "key",
                                                      "value",
                                                      "past_key",
                                                      "past_value",
                                                      "seqlens_k",
                                                      "total_sequence_length",
                                                      "cos_cache",
                                                      "sin_cache",
                                                      "position_ids",
                                                      "attention_bias",
                                                      "head_sink",
                                                      "k_scale",
                                                      "v_scale",
                                                      "q_norm_weight",
                                                      "k_norm_weight",
                                                      "query_seqlens"};
  return kNames[slot];
}

GqaNode ReadNode(const ort::NodeInfo& info, DType dtype) {
  const Reader reader(info);
  RefuseAttributes(reader);
  GqaNode node{};
  node.name = reader.name();
  node.dtype = dtype;
  node.q_heads = reader.Positive("num_heads");
  node.kv_heads = reader.Positive("kv_num_heads");
  if (node.q_heads % node.kv_heads != 0) reader.Invalid("num_heads must be a multiple of kv_num_heads");
  node.scale = reader.Float("scale", 0.0f);
  node.softcap = reader.Float("softcap", 0.0f);
  node.window = static_cast<int32_t>(
      std::clamp<int64_t>(reader.Int("local_window_size", -1), -1, std::numeric_limits<int32_t>::max()));
  node.rotary = reader.Flag("do_rotary");
  node.rotary_interleaved = reader.Flag("rotary_interleaved");
  // Older exporters write -1 for "not used".
  node.smooth_softmax = reader.Int("smooth_softmax", 0) > 0;
  const float epsilon = reader.Float("qk_norm_epsilon", 1e-6f);
  node.q_norm_epsilon = reader.Float("q_norm_epsilon", epsilon);
  node.k_norm_epsilon = reader.Float("k_norm_epsilon", epsilon);
  ReadLayout(reader, node);
  for (size_t slot = 0; slot < kInputCount; ++slot) node.has[slot] = !info.input(slot).empty();
  CheckPorts(reader, info, node);
  return node;
}

}  // namespace onnx_kv
