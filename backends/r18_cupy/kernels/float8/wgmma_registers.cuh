// Asynchronous e4m3 products of a warpgroup, with A in registers: D = A·Bᵀ + D in float32. sm_90a
// only. See hopper/wgmma.cuh, which has the fences and the accumulator layout. `_begin`: D is not
// read.
//
// Of its warp's 16 rows of A, a lane holds rows i / 4 and 8 more: bytes 4·(i % 4) to 4·(i % 4) + 3
// of both rows, then these bytes + 16. The registers must not change while products are in flight.
//
// NOTE: the unit adds at 13 bits of fraction, whatever the registers hold.
#pragma once
#include "hopper/wgmma.cuh"

template <int N>
__device__ __forceinline__ void e4m3_registers(float (&d)[N / 2], const unsigned (&a)[4],
                                               unsigned long long b);
template <int N>
__device__ __forceinline__ void e4m3_registers_begin(float (&d)[N / 2], const unsigned (&a)[4],
                                                     unsigned long long b);

#define WGMMA_E4M3_REGISTERS(NAME, ADDS, N, COUNT, A0, A1, A2, A3, B)                       \
  template <>                                                                               \
  __device__ __forceinline__ void NAME<N>(                                                  \
      float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {                    \
    asm volatile(                                                                           \
        "{\n.reg .pred add;\nsetp.eq.u32 add, " #ADDS ", 1;\n"                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_NAMES_##COUNT    \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1;\n}"               \
        : WGMMA_ACC_##COUNT                                                                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
  }

WGMMA_E4M3_REGISTERS(e4m3_registers, 1, 64, 32, 32, 33, 34, 35, 36)
WGMMA_E4M3_REGISTERS(e4m3_registers_begin, 0, 64, 32, 32, 33, 34, 35, 36)
WGMMA_E4M3_REGISTERS(e4m3_registers, 1, 112, 56, 56, 57, 58, 59, 60)
WGMMA_E4M3_REGISTERS(e4m3_registers_begin, 0, 112, 56, 56, 57, 58, 59, 60)
