// The element types, without any CUDA header: DTYPE is 0 float, 1 half, 2 bfloat16 (onnx_kv::DType).
#pragma once

#include <cstdint>

#if DTYPE == 0
using Element = float;
#else
using Element = uint16_t;  // the bits of a half or a bfloat16
#endif

constexpr int kChunkElements = 16 / sizeof(Element);  // of a 16-byte access

__device__ __forceinline__ float ToFloat(Element value) {
#if DTYPE == 0
  return value;
#elif DTYPE == 1
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
#else
  return __uint_as_float(static_cast<uint32_t>(value) << 16);
#endif
}

__device__ __forceinline__ Element FromFloat(float value) {
#if DTYPE == 0
  return value;
#else
  Element result;
#if DTYPE == 1
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
#endif
  return result;
#endif
}

__device__ __forceinline__ Element ElementOf(uint4 chunk, int index) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#if DTYPE == 0
  return __uint_as_float(words[index]);
#else
  return static_cast<Element>(words[index / 2] >> (index % 2 * 16));
#endif
}

#if DTYPE != 0
// Two neighbours in one register, `low` at the lower address.
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  uint32_t result;
#if DTYPE == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#endif
  return result;
}
#endif
