// `wgmma` of e4m3: D = A·Bᵀ + D in float32 registers, with A (weights) and B (activations) in shared
// memory. sm_90a only. One instruction multiplies 32 bytes of K of each row.
//
// Matrices and accumulators lie as in integers/hopper/wgmma.cuh.
//
// NOTE: the unit adds at 13 bits of fraction, whatever the registers hold. Long sums are promoted:
// see hopper/tile.cuh.
#pragma once
#include "float8/e4m3.cuh"
#include "integers/hopper/wgmma.cuh"

// Without `accumulates`, D is not read: sums need no zeros to begin with.
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], unsigned long long a,
                                           unsigned long long b, int accumulates);

#define WGMMA_ACC_120 WGMMA_ACC_112, WGMMA_RUN_8(112)

// `A`, `B`, `ADDS`: operand numbers of the descriptors and the flag, which follow the accumulators.
#define WGMMA_OF_E4M3(N, COUNT, A, B, ADDS)                                                 \
  template <>                                                                               \
  __device__ __forceinline__ void wgmma_e4m3<N>(float (&d)[N / 2], unsigned long long a,    \
                                                unsigned long long b, int accumulates) {    \
    asm volatile(                                                                           \
        "{\n.reg .pred add;\nsetp.ne.u32 add, %" #ADDS ", 0;\n"                             \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_NAMES_##COUNT    \
        "}, %" #A ", %" #B ", add, 1, 1;\n}"                                                \
        : WGMMA_ACC_##COUNT                                                                 \
        : "l"(a), "l"(b), "r"(accumulates));                                                \
  }

WGMMA_OF_E4M3(64, 32, 32, 33, 34)
WGMMA_OF_E4M3(128, 64, 64, 65, 66)
WGMMA_OF_E4M3(192, 96, 96, 97, 98)
WGMMA_OF_E4M3(208, 104, 104, 105, 106)
WGMMA_OF_E4M3(240, 120, 120, 121, 122)
