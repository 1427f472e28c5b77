// What happens to a score between the product and the exponential, and the softmax's extra denominators.
#pragma once

#include "onnx_kv/ops/gqa/cuda/rows.cuh"

// Scores are kept in units of log2: weight = 2^(score - maximum).
struct ScoreScale {
  float factor;   // of q·k; without a softcap this gives log2 units, with one tanh's argument
  float softcap;  // in log2 units; 0: none

  __device__ __forceinline__ explicit ScoreScale(const onnx_kv::GqaParams& p)
      : factor(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E), softcap(p.softcap * kLog2E) {}

  __device__ __forceinline__ float operator()(float product) const {
    const float score = product * factor;
    return softcap > 0 ? softcap * tanhf(score) : score;
  }
};

// The bias row of (row, query head, new token), or nullptr; index it by the token attended to.
__device__ __forceinline__ const Element* BiasRow(const onnx_kv::GqaParams& p, int row, int head, int index) {
  if (p.attention_bias == nullptr) return nullptr;
  return static_cast<const Element*>(p.attention_bias) + row * p.bias_batch_stride + head * p.bias_head_stride +
         index * p.bias_row_stride;
}

// A score (log2 units) with its bias; a bias of half's lowest number or below is a mask.
__device__ __forceinline__ float AddBias(float score, Element bias) {
  const float value = ToFloat(bias);
  return value <= -65504.0f ? MinusInfinity() : score + value * kLog2E;
}

// What the maximum is subtracted as: a row that attends to nothing yet has none.
__device__ __forceinline__ float FiniteBase(float maximum) { return maximum == MinusInfinity() ? 0.0f : maximum; }

// Factor that turns a sum of weighted values (relative to `maximum`, with the weights' sum `sum`) into the output.
__device__ __forceinline__ float OutputFactor(const onnx_kv::GqaParams& p, int head, float maximum, float sum) {
  float sink = MinusInfinity();
  if (p.head_sink != nullptr) {
    sink = ToFloat(static_cast<const Element*>(p.head_sink)[head]) * kLog2E;
  } else if (p.smooth_softmax) {
    sink = 0;
  }
  const float base = FiniteBase(fmaxf(maximum, sink));
  const float own = Exp2(maximum - base), denominator = sum * own + Exp2(sink - base);
  return denominator > 0 || denominator != denominator ? own / denominator : 0.0f;
}
