// Vectors of sixteen floats with AVX-512. The same names as in simd_portable.h, which says what they mean.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace onnx_kv::cpu {
namespace {

constexpr int kWidth = 16;
constexpr int kDotRows = 6;  // times four keys: twenty-four sums in flight, thirty-two registers
constexpr int kSumRows = 8;  // times two vectors

using Vec = __m512;

inline Vec Set(float x) { return _mm512_set1_ps(x); }
inline Vec Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec Div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec Min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec IfLess(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
inline Vec Round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec PowerOfTwo(Vec n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
inline float MaxOf(Vec v) { return _mm512_reduce_max_ps(v); }
inline __m256 Fold(Vec v) {
  return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
}
inline void SumsOf(const Vec v[4], float* sums) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(Fold(v[0]), Fold(v[1])), _mm256_hadd_ps(Fold(v[2]), Fold(v[3])));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
inline float SumOf(Vec v) {
  const Vec repeated[4] = {v, v, v, v};
  float sums[4];
  SumsOf(repeated, sums);
  return sums[0];
}
inline Vec LoadHalf(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void StoreHalf(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace onnx_kv::cpu
