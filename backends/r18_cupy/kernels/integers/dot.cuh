// Products of bytes: four at a time, added to an int32 (PTX ISA, "dp4a"). There is no intrinsic for
// an unsigned and a signed operand.
#pragma once

// sum + Σ x·w over the four bytes of each word. T: the type of those of x; those of w are signed.
template <typename T>
__device__ __forceinline__ int dot4(unsigned x, unsigned w, int sum);

template <>
__device__ __forceinline__ int dot4<unsigned char>(unsigned x, unsigned w, int sum) {
  int result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(w), "r"(sum));
  return result;
}

template <>
__device__ __forceinline__ int dot4<signed char>(unsigned x, unsigned w, int sum) {
  int result;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(w), "r"(sum));
  return result;
}

template <typename T>
__device__ __forceinline__ int dot16(const uint4& x, const uint4& w, int sum) {
  sum = dot4<T>(x.x, w.x, sum);
  sum = dot4<T>(x.y, w.y, sum);
  sum = dot4<T>(x.z, w.z, sum);
  return dot4<T>(x.w, w.w, sum);
}
