// e4m3 numbers and float, and the epilogue of scaled ops (r18/graph/scaled.py).
#pragma once
#include <cuda_fp8.h>

#include "common/storage.cuh"

// Two neighbouring numbers, the first in the lower byte.
__device__ __forceinline__ float2 from_e4m3_pair(unsigned short pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}

__device__ __forceinline__ float from_e4m3(unsigned char byte) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}

// To nearest, ties to even, saturated at ±448; NaN stays NaN.
__device__ __forceinline__ unsigned char to_e4m3(float number) {
  return __nv_cvt_float_to_fp8(number, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ unsigned to_e4m3_pair(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

// A whole sum as the number that is stored, before it is rounded. `residual` is 0 where there is
// none, and its multiplier too.
__device__ __forceinline__ float finished(float sum, float multiplier, float bias, float residual,
                                          float residual_multiplier, bool clamps) {
  const float number = fmaf(residual, residual_multiplier, fmaf(sum, multiplier, bias));
  return clamps ? relu(number) : number;
}
