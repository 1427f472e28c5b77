// What is done to numbers one by one, on the vectors of whichever simd_*.h was included before: see tile.h.
#pragma once

#include "onnx_kv/ops/gqa/cpu/kernels.h"

namespace onnx_kv::cpu {
namespace {

// e^x to about one unit in the last place for x <= 88; exactly 0 for x < -87, where the result would be subnormal.
// Range reduction to r = x - n*ln(2), then the Taylor series of e^r, whose next term is below 1e-8.
inline Vec Exp(Vec x) {
  const Vec clamped = Max(Set(-87.0f), Min(Set(88.0f), x));
  const Vec n = Round(Mul(clamped, Set(1.44269504f)));
  Vec r = Fma(n, Set(-0.693359375f), clamped);  // ln(2) in two parts, the first exact in few bits
  r = Fma(n, Set(2.12194440e-4f), r);
  constexpr float kTerms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  Vec sum = Set(1.0f / 5040);
  for (float term : kTerms) sum = Fma(sum, r, Set(term));
  return IfLess(x, Set(-87.0f), Set(0.0f), Mul(sum, PowerOfTwo(n)));
}

inline float Exp(float x) {
  float lanes[kWidth];
  Store(lanes, Exp(Set(x)));
  return lanes[0];
}

// cap * tanh(score / cap), as 1 - 2 / (e^2y + 1); beyond |y| = 9 the result is 1 in float.
inline Vec SoftCap(Vec score, float cap) {
  const Vec y = Max(Set(-9.0f), Min(Set(9.0f), Div(score, Set(cap))));
  const Vec power = Exp(Add(y, y));
  const Vec one = Set(1.0f);
  return Mul(Set(cap), Div(Sub(power, one), Add(power, one)));
}

// Calls f with a null pointer of the element type.
template <typename F>
void WithElement(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Half*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat*>(nullptr));
  }
}

// Converts `count` elements from or to floats, the last few by way of a whole vector.
template <typename From, typename To>
inline void Convert(const From* source, To* target, int count) {
  int i = 0;
  for (; i + kWidth <= count; i += kWidth) Store(target + i, Load(source + i));
  if (i == count) return;
  From tail[kWidth] = {};
  To converted[kWidth];
  __builtin_memcpy(tail, source + i, sizeof(From) * (count - i));
  Store(converted, Load(tail));
  __builtin_memcpy(target + i, converted, sizeof(To) * (count - i));
}

void Widen(DType dtype, const void* source, float* target, int count) {
  WithElement(
      dtype, [&](auto* element) { Convert(static_cast<decltype(element)>(const_cast<void*>(source)), target, count); });
}

void Narrow(DType dtype, const float* source, void* target, int count) {
  WithElement(dtype, [&](auto* element) { Convert(source, static_cast<decltype(element)>(target), count); });
}

// Converts `count` elements and fills up with zeros to `padded`.
template <typename T>
inline void Stage(const T* source, int count, float* target, int padded) {
  Convert(source, target, count);
  for (int i = count; i < padded; ++i) target[i] = 0.0f;
}

template <typename T>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;

}  // namespace
}  // namespace onnx_kv::cpu
