// Pairs of adjacent elements in a storage format, packed into as few registers as possible. sm_80
// and later.
#pragma once
#include "common/storage.cuh"

template <typename T>
struct PairOf;
template <>
struct PairOf<float> { using type = float2; };
template <>
struct PairOf<__half> { using type = __half2; };
template <>
struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };

template <typename T>
using Pair = typename PairOf<T>::type;

template <typename T>
__device__ __forceinline__ Pair<T> pair_of(float a, float b);
template <>
__device__ __forceinline__ float2 pair_of<float>(float a, float b) { return make_float2(a, b); }
template <>
__device__ __forceinline__ __half2 pair_of<__half>(float a, float b) {
  return __floats2half2_rn(a, b);
}
template <>
__device__ __forceinline__ __nv_bfloat162 pair_of<__nv_bfloat16>(float a, float b) {
  return __floats2bfloat162_rn(a, b);
}

// Results as they are stored; pairs of 16 bits have been rounded.
__device__ __forceinline__ float2 to_output(float2 pair) {
  return make_float2(to_output(pair.x), to_output(pair.y));
}
__device__ __forceinline__ __half2 to_output(__half2 pair) { return pair; }
__device__ __forceinline__ __nv_bfloat162 to_output(__nv_bfloat162 pair) { return pair; }

// The larger of two values, elementwise for pairs; NaN where either is NaN.
__device__ __forceinline__ float larger(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}
__device__ __forceinline__ float2 larger(float2 a, float2 b) {
  return make_float2(larger(a.x, b.x), larger(a.y, b.y));
}
__device__ __forceinline__ __half2 larger(__half2 a, __half2 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hmax2_nan(a, b);
}

// Shuffle: the value of another lane. All lanes of the warp must call it.
__device__ __forceinline__ float2 from_lane(float2 given, int lane) {
  return make_float2(__shfl_sync(0xffffffffu, given.x, lane),
                     __shfl_sync(0xffffffffu, given.y, lane));
}
__device__ __forceinline__ __half2 from_lane(__half2 given, int lane) {
  return __shfl_sync(0xffffffffu, given, lane);
}
__device__ __forceinline__ __nv_bfloat162 from_lane(__nv_bfloat162 given, int lane) {
  return __shfl_sync(0xffffffffu, given, lane);
}
