// Asynchronous integer products of a warpgroup, with A in registers: D = A·Bᵀ + D. A and B are
// signed bytes, sums are int32. sm_90a only. See hopper/wgmma.cuh, which has the fences
// and the accumulator layout.
//
// Of its warp's 16 rows of A, a lane holds rows i / 4 and 8 more: bytes 4·(i % 4) to 4·(i % 4) + 3
// of both rows, then these bytes + 16. The registers must not change while products are in flight.
#pragma once
#include "hopper/wgmma.cuh"

template <int N>
__device__ __forceinline__ void wgmma_registers(int (&d)[N / 2], const unsigned (&a)[4],
                                                unsigned long long b);

#define WGMMA_SUM_8(i) \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
  "+r"(d[i + 6]), "+r"(d[i + 7])
#define WGMMA_SUM_32 WGMMA_SUM_8(0), WGMMA_SUM_8(8), WGMMA_SUM_8(16), WGMMA_SUM_8(24)
#define WGMMA_SUM_56 WGMMA_SUM_32, WGMMA_SUM_8(32), WGMMA_SUM_8(40), WGMMA_SUM_8(48)

#define WGMMA_OF_BYTES(N, COUNT, A0, A1, A2, A3, B)                                    \
  template <>                                                                               \
  __device__ __forceinline__ void wgmma_registers<N>(                                       \
      int (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {                      \
    asm volatile(                                                                           \
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                                      \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" WGMMA_NAMES_##COUNT        \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add;\n}"                     \
        : WGMMA_SUM_##COUNT                                                                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
  }

WGMMA_OF_BYTES(64, 32, 32, 33, 34, 35, 36)
WGMMA_OF_BYTES(112, 56, 56, 57, 58, 59, 60)
