// `wgmma` of bytes with A in registers: int8 in both matrices and sums in int32, or e4m3 and
// float32. See hopper/wgmma.cuh, which has the fences and the accumulator layout. `_begin`: D is
// not read.
//
// A lane holds rows i / 4 and i / 4 + 8 of its warp's 16 rows of A: bytes 4·(i % 4) to 4·(i % 4) +
// 3 of both rows, then these bytes + 16. The registers must not change while products are in
// flight.
#pragma once
#include "bytes/hopper/wgmma.cuh"

template <typename X, int N>
__device__ __forceinline__ void registers_wgmma(Sum<X> (&d)[N / 2], const unsigned (&a)[4],
                                                unsigned long long b);
template <typename X, int N>
__device__ __forceinline__ void registers_wgmma_begin(Sum<X> (&d)[N / 2], const unsigned (&a)[4],
                                                      unsigned long long b);

#define WGMMA_BYTES_REGISTERS(NAME, ADDS, X, SUM, R, TYPES, SIGNS, N, COUNT, A0, A1, A2, A3, B) \
  template <>                                                                               \
  __device__ __forceinline__ void NAME<X, N>(                                               \
      SUM (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {                      \
    asm volatile(                                                                           \
        "{\n.reg .pred add;\nsetp.eq.u32 add, " #ADDS ", 1;\n"                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" WGMMA_NAMES_##COUNT        \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add" SIGNS ";\n}"            \
        : WGMMA_SUMS_##COUNT(R)                                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
  }
#define WGMMA_OF_REGISTERS(NAME, ADDS, ...)                                                     \
  WGMMA_BYTES_REGISTERS(NAME, ADDS, signed char, int, "+r", "s32.s8.s8", "", __VA_ARGS__)       \
  WGMMA_BYTES_REGISTERS(NAME, ADDS, E4m3, float, "+f", "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__)

WGMMA_OF_REGISTERS(registers_wgmma, 1, 64, 32, 32, 33, 34, 35, 36)
WGMMA_OF_REGISTERS(registers_wgmma, 1, 112, 56, 56, 57, 58, 59, 60)
WGMMA_OF_REGISTERS(registers_wgmma_begin, 0, 64, 32, 32, 33, 34, 35, 36)
WGMMA_OF_REGISTERS(registers_wgmma_begin, 0, 112, 56, 56, 57, 58, 59, 60)
