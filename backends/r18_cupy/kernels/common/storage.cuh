// Storage formats and their conversion to and from float.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// A result in float as it is stored. With TF32_OUTPUT it is rounded to tf32, to nearest with ties
// away from zero: tensor cores ignore the low 13 bits of an operand, and the next layer's loss by
// that leans to zero. Infinities and NaN stay; arithmetic never makes a NaN of low bits
// only, which would become infinite. Host counterpart: `round_to_tf32` in r18/graph/precision.py.
__device__ __forceinline__ float to_output(float x) {
#ifdef TF32_OUTPUT
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return __uint_as_float(rounded);
#else
  return x;
#endif
}

// max(x, 0) that keeps NaN, unlike fmaxf.
__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }
