#include "onnx_kv/ops/gqa/contract.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

namespace onnx_kv {
namespace {

constexpr int64_t kAny = -1;

// One call's inputs, checked as they are fetched.
class Inputs {
 public:
  Inputs(const GqaNode& node, const ort::Call& call) : node_(node), call_(call) {}

  // An input whose shape must be `expected`; kAny leaves an axis open.
  ort::Tensor Get(size_t slot, std::initializer_list<int64_t> expected) const {
    const ort::Tensor tensor = call_.Input(slot);
    bool fits = tensor.rank == expected.size();
    for (size_t axis = 0; fits && axis < tensor.rank; ++axis) {
      const int64_t want = expected.begin()[axis];
      fits = (want == kAny || tensor.dims[axis] == want) && tensor.dims[axis] <= std::numeric_limits<int32_t>::max();
    }
    if (!fits) Invalid(slot, "has shape " + tensor.ShapeText() + ", expected " + ShapeText(expected));
    return tensor;
  }

  // The address of an optional input, nullptr where it is not connected.
  const void* Optional(size_t slot, std::initializer_list<int64_t> expected) const {
    return node_.has[slot] ? Get(slot, expected).data : nullptr;
  }

  [[noreturn]] void Invalid(size_t slot, const std::string& problem) const {
    throw Error(ONNX_KV_INVALID_ARGUMENT,
                "GroupQueryAttention node '" + node_.name + "': input " + InputName(slot) + " " + problem);
  }

 private:
  static std::string ShapeText(std::initializer_list<int64_t> dims) {
    std::string text = "[";
    for (int64_t dim : dims) text += (text.size() == 1 ? "" : ", ") + (dim == kAny ? "any" : std::to_string(dim));
    return text + "]";
  }

  const GqaNode& node_;
  const ort::Call& call_;
};

void TakeQueryKeyValue(const GqaNode& node, const Inputs& inputs, GqaParams& p) {
  const ort::Tensor query = inputs.Get(kQuery, {kAny, kAny, kAny});
  const int64_t width = query.dims[2];
  const bool packed = !node.has[kKey];
  const int64_t heads = packed ? node.q_heads + 2 * int64_t{node.kv_heads} : node.q_heads;
  if (width == 0 || width % heads != 0) {
    inputs.Invalid(kQuery, "has " + std::to_string(width) + " channels, which " + std::to_string(heads) +
                               (packed ? " packed query, key and value heads" : " query heads") + " cannot share");
  }
  p.batch = static_cast<int32_t>(query.dims[0]);
  p.q_len = static_cast<int32_t>(query.dims[1]);
  p.head_dim = static_cast<int32_t>(width / heads);
  p.query = query.data;
  p.query_token_stride = width;
  const int64_t kv_width = int64_t{node.kv_heads} * p.head_dim;
  if (packed) {
    const size_t element = node.dtype == DType::kFloat32 ? 4 : 2;
    p.key = static_cast<const char*>(query.data) + element * node.q_heads * p.head_dim;
    p.value = static_cast<const char*>(p.key) + element * kv_width;
    p.kv_token_stride = width;
  } else {
    p.key = inputs.Get(kKey, {p.batch, p.q_len, kv_width}).data;
    p.value = inputs.Get(kValue, {p.batch, p.q_len, kv_width}).data;
    p.kv_token_stride = kv_width;
  }
}

// The present has room for the longest sequence of the call and never less than the past.
void TakeCache(const GqaNode& node, const Inputs& inputs, const ort::Call& call, GqaParams& p, int64_t total) {
  if (node.has[kPastKey]) {
    const ort::Tensor past = inputs.Get(kPastKey, {p.batch, p.kv_heads, kAny, p.head_dim});
    p.past_capacity = static_cast<int32_t>(past.dims[2]);
    p.past_key = past.data;
    p.past_value = inputs.Get(kPastValue, {p.batch, p.kv_heads, p.past_capacity, p.head_dim}).data;
  }
  p.present_capacity = static_cast<int32_t>(std::max<int64_t>(p.past_capacity, total));
  const int64_t shape[] = {p.batch, p.kv_heads, p.present_capacity, p.head_dim};
  p.present_key = call.Output(kPresentKey, shape);
  p.present_value = call.Output(kPresentValue, shape);
  p.past = StridesOf(node.layout, p.kv_heads, p.head_dim, p.past_capacity, node.token_stride);
  p.present = StridesOf(node.layout, p.kv_heads, p.head_dim, p.present_capacity, node.token_stride);
  if (p.past_capacity == 0) p.past_key = p.past_value = nullptr;
  if ((p.past_key == p.present_key) != (p.past_value == p.present_value)) {
    inputs.Invalid(kPastValue, "and past_key disagree: one shares its buffer with the present, the other does not");
  }
  if (p.past_key == p.present_key && p.past_capacity != p.present_capacity) {
    inputs.Invalid(kTotalSequenceLength, "is " + std::to_string(total) +
                                             ", but past and present are one buffer with room for " +
                                             std::to_string(p.past_capacity) + " tokens");
  }
  if (!node.interleaved()) return;
  if (p.past_key != p.present_key) {
    inputs.Invalid(kPastKey, "and present_key must be one buffer in an interleaved layout (paired, token-major)");
  }
  if (node.token_stride < 2 * int64_t{p.kv_heads} * p.head_dim) {
    inputs.Invalid(kPastKey, "needs kv_token_stride of at least " +
                                 std::to_string(2 * int64_t{p.kv_heads} * p.head_dim) + " elements, the node has " +
                                 std::to_string(node.token_stride));
  }
}

void TakeRotary(const GqaNode& node, const Inputs& inputs, GqaParams& p) {
  if (!node.rotary) return;
  const ort::Tensor cos = inputs.Get(kCosCache, {kAny, kAny});
  p.rotary_rows = static_cast<int32_t>(cos.dims[0]);
  p.rotary_dim = static_cast<int32_t>(std::min<int64_t>(2 * cos.dims[1], std::numeric_limits<int32_t>::max()));
  if (p.rotary_dim > p.head_dim) {
    inputs.Invalid(kCosCache,
                   "has shape " + cos.ShapeText() + ": more than half of head size " + std::to_string(p.head_dim));
  }
  p.cos_cache = cos.data;
  p.sin_cache = inputs.Get(kSinCache, {p.rotary_rows, cos.dims[1]}).data;
  p.rotary_interleaved = node.rotary_interleaved;
  p.position_ids = static_cast<const int64_t*>(inputs.Optional(kPositionIds, {p.batch, p.q_len}));
}

void TakeBias(const GqaNode& node, const Inputs& inputs, GqaParams& p, int64_t total) {
  if (!node.has[kAttentionBias]) return;
  const ort::Tensor bias = inputs.Get(kAttentionBias, {kAny, kAny, p.q_len, kAny});
  const bool fits = (bias.dims[0] == 1 || bias.dims[0] == p.batch) &&
                    (bias.dims[1] == 1 || bias.dims[1] == p.q_heads) && bias.dims[3] >= total;
  if (!fits) {
    inputs.Invalid(kAttentionBias, "has shape " + bias.ShapeText() + ", expected [1 or " + std::to_string(p.batch) +
                                       ", 1 or " + std::to_string(p.q_heads) + ", " + std::to_string(p.q_len) + ", " +
                                       std::to_string(total) + " or more]");
  }
  p.attention_bias = bias.data;
  p.bias_row_stride = bias.dims[3];
  p.bias_head_stride = bias.dims[1] == 1 ? 0 : bias.dims[2] * bias.dims[3];
  p.bias_batch_stride = bias.dims[0] == 1 ? 0 : bias.dims[1] * bias.dims[2] * bias.dims[3];
}

const int32_t* TakeLengths(const Inputs& inputs, const ort::Call& call, int32_t batch) {
  const ort::Tensor lengths = call.Input(kSeqlensK);
  const bool fits = (lengths.rank == 1 || (lengths.rank == 2 && lengths.dims[1] == 1)) && lengths.dims[0] == batch;
  if (!fits) {
    inputs.Invalid(kSeqlensK, "has shape " + lengths.ShapeText() + ", expected [" + std::to_string(batch) + "] or [" +
                                  std::to_string(batch) + ", 1]");
  }
  return static_cast<const int32_t*>(lengths.data);
}

// The one value that is read on the host, on either provider.
int64_t TotalSequenceLength(const Inputs& inputs, const ort::Call& call) {
  const ort::Tensor total = call.Input(kTotalSequenceLength);
  if (total.rank > 1 || (total.rank == 1 && total.dims[0] != 1)) {
    inputs.Invalid(kTotalSequenceLength, "has shape " + total.ShapeText() + ", expected one number");
  }
  const int32_t value = *static_cast<const int32_t*>(total.data);
  if (value < 1) inputs.Invalid(kTotalSequenceLength, "is " + std::to_string(value) + ", expected 1 or more");
  return value;
}

}  // namespace

GqaParams CheckCall(const GqaNode& node, const ort::Call& call) {
  const Inputs inputs(node, call);
  GqaParams p{};
  p.dtype = node.dtype;
  p.q_heads = node.q_heads;
  p.kv_heads = node.kv_heads;
  p.softcap = node.softcap;
  p.window = node.window;
  p.smooth_softmax = node.smooth_softmax;
  p.q_norm_epsilon = node.q_norm_epsilon;
  p.k_norm_epsilon = node.k_norm_epsilon;

  TakeQueryKeyValue(node, inputs, p);
  p.scale = node.scale != 0 ? node.scale : 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  p.seqlens_k = TakeLengths(inputs, call, p.batch);
  p.query_seqlens = static_cast<const int32_t*>(inputs.Optional(kQuerySeqlens, {p.batch}));
  const int64_t total = TotalSequenceLength(inputs, call);
  TakeRotary(node, inputs, p);
  TakeBias(node, inputs, p, total);
  p.head_sink = inputs.Optional(kHeadSink, {p.q_heads});
  p.q_norm_weight = inputs.Optional(kQNormWeight, {p.head_dim});
  p.k_norm_weight = inputs.Optional(kKNormWeight, {p.head_dim});
  TakeCache(node, inputs, call, p, total);
  const int64_t shape[] = {p.batch, p.q_len, int64_t{p.q_heads} * p.head_dim};
  p.output = call.Output(kOutput, shape);
  return p;
}

}  // namespace onnx_kv
