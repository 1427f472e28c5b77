// Vectors of eight floats in plain C++, for compilers to vectorise. The same names as in simd_avx2.h, simd_avx512.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "onnx_kv/ops/gqa/cpu/kernels.h"

namespace onnx_kv::cpu {
namespace {

constexpr int kWidth = 8;
constexpr int kDotRows = 2;  // query rows of one block of dot products
constexpr int kSumRows = 4;  // query rows of one block of weighted sums

struct Vec {
  float lane[kWidth];
};

template <typename F>
inline Vec Lanes(F&& f) {
  Vec v;
  for (int i = 0; i < kWidth; ++i) v.lane[i] = f(i);
  return v;
}

inline Vec Set(float x) {
  return Lanes([&](int) { return x; });
}
inline Vec Load(const float* p) {
  return Lanes([&](int i) { return p[i]; });
}
inline void Store(float* p, const Vec& v) {
  for (int i = 0; i < kWidth; ++i) p[i] = v.lane[i];
}
inline Vec Add(const Vec& a, const Vec& b) {
  return Lanes([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec Sub(const Vec& a, const Vec& b) {
  return Lanes([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec Mul(const Vec& a, const Vec& b) {
  return Lanes([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec Div(const Vec& a, const Vec& b) {
  return Lanes([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a * b + c, rounded once where the processor can.
inline Vec Fma(const Vec& a, const Vec& b, const Vec& c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return Lanes([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
#else
  return Lanes([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
#endif
}
// b where a lane is not a number.
inline Vec Max(const Vec& a, const Vec& b) {
  return Lanes([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec Min(const Vec& a, const Vec& b) {
  return Lanes([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
// a < b ? x : y
inline Vec IfLess(const Vec& a, const Vec& b, const Vec& x, const Vec& y) {
  return Lanes([&](int i) { return a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]; });
}
// To the nearest whole number, for |a| below 2^22.
inline Vec Round(const Vec& a) {
  constexpr float kWhole = 0x1.8p23f;  // floats of this size are whole numbers
  return Lanes([&](int i) { return (a.lane[i] + kWhole) - kWhole; });
}
// 2^n for whole n in [-126, 127].
inline Vec PowerOfTwo(const Vec& n) {
  return Lanes([&](int i) {
    const int32_t bits = (static_cast<int32_t>(n.lane[i]) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return power;
  });
}
inline float MaxOf(const Vec& v) {
  float most = v.lane[0];
  for (int i = 1; i < kWidth; ++i) most = most > v.lane[i] ? most : v.lane[i];
  return most;
}
inline float SumOf(const Vec& v) {
  float half[4];
  for (int i = 0; i < 4; ++i) half[i] = v.lane[i] + v.lane[i + 4];
  return (half[0] + half[1]) + (half[2] + half[3]);
}
// The sums of four vectors.
inline void SumsOf(const Vec v[4], float* sums) {
  for (int i = 0; i < 4; ++i) sums[i] = SumOf(v[i]);
}

inline float FloatOfHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  float value;
  if (magnitude >= 0x7c00) {  // infinity, not a number
    const uint32_t bits = sign | 0x7f800000 | (magnitude << 13);
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  // Exact for subnormals too: the exponents differ by 112.
  const uint32_t bits = magnitude << 13;
  std::memcpy(&value, &bits, sizeof(value));
  value *= 0x1p112f;
  return sign != 0 ? -value : value;
}
inline uint16_t HalfOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds beyond 65504
  if (magnitude < 0x38800000) {                       // subnormal: let the adder round
    float wide;
    std::memcpy(&wide, &magnitude, sizeof(wide));
    wide += 0.5f;
    std::memcpy(&bits, &wide, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}
inline float FloatOfBFloat(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}
inline uint16_t BFloatOfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline Vec Load(const Half* p) {
  return Lanes([&](int i) { return FloatOfHalf(p[i].bits); });
}
inline Vec Load(const BFloat* p) {
  return Lanes([&](int i) { return FloatOfBFloat(p[i].bits); });
}
inline void Store(Half* p, const Vec& v) {
  for (int i = 0; i < kWidth; ++i) p[i].bits = HalfOfFloat(v.lane[i]);
}
inline void Store(BFloat* p, const Vec& v) {
  for (int i = 0; i < kWidth; ++i) p[i].bits = BFloatOfFloat(v.lane[i]);
}

}  // namespace
}  // namespace onnx_kv::cpu
