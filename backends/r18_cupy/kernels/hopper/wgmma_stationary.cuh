// `wgmma` with A in registers, for weights that a warpgroup loads once and keeps. sm_90a only (PTX
// ISA, "Register fragments for wgmma.mma_async.m64nNk16").
#pragma once
#include "hopper/wgmma.cuh"

// `wgmma_stationary`: D = A·Bᵀ + D. `wgmma_stationary_begin`: D = A·Bᵀ; D is not read. Of a warp's 16
// rows of A, lane i holds rows i / 4 and i / 4 + 8: word i % 4 of both, then word i % 4 + 4 of both.
// A K step has eight words of 4 bytes. The registers must not change while products are in flight.
//
// ADDS and D: 1 and ACC (accumulators are read and written), or 0 and NEW (only written). A0 to A3
// and B: operand numbers of A's registers and of B's descriptor, which follow the accumulators.
#define WGMMA_STATIONARY(NAME, ADDS, D, T, N, STEP_AND_TYPES, COUNT, A0, A1, A2, A3, B, ORDER) \
  __device__ __forceinline__ void NAME(T, float (&d)[COUNT], const uint4& a,                 \
                                       unsigned long long b) {                               \
    asm volatile(                                                                            \
        "{\n.reg .pred add;\nsetp.eq.u32 add, " #ADDS ", 1;\n"                              \
        "wgmma.mma_async.sync.aligned.m64n" #N STEP_AND_TYPES " {" WGMMA_NAMES_##COUNT       \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1" ORDER ";\n}"       \
        : WGMMA_##D##_##COUNT                                                                \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));                                   \
  }
#define WGMMA_STATIONARY_OF_EACH_TYPE(NAME, ADDS, D, N, COUNT, ...)                            \
  WGMMA_STATIONARY(NAME, ADDS, D, __half, N, "k16.f32.f16.f16", COUNT, __VA_ARGS__, ", 0")    \
  WGMMA_STATIONARY(NAME, ADDS, D, __nv_bfloat16, N, "k16.f32.bf16.bf16", COUNT, __VA_ARGS__, \
                   ", 0")                                                                     \
  WGMMA_STATIONARY(NAME, ADDS, D, float, N, "k8.f32.tf32.tf32", COUNT, __VA_ARGS__, "")
#define WGMMA_STATIONARY_BOTH(...)                                     \
  WGMMA_STATIONARY_OF_EACH_TYPE(wgmma_stationary, 1, ACC, __VA_ARGS__) \
  WGMMA_STATIONARY_OF_EACH_TYPE(wgmma_stationary_begin, 0, NEW, __VA_ARGS__)

#define WGMMA_NEW_4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define WGMMA_NEW_8(i) WGMMA_NEW_4(i), WGMMA_NEW_4(i + 4)
#define WGMMA_NEW_16(i) WGMMA_NEW_8(i), WGMMA_NEW_8(i + 8)
#define WGMMA_NEW_28 WGMMA_NEW_16(0), WGMMA_NEW_8(16), WGMMA_NEW_4(24)
#define WGMMA_NEW_32 WGMMA_NEW_16(0), WGMMA_NEW_16(16)
#define WGMMA_NEW_56 WGMMA_NEW_32, WGMMA_NEW_16(32), WGMMA_NEW_8(48)

WGMMA_STATIONARY_BOTH(56, 28, 28, 29, 30, 31, 32)
WGMMA_STATIONARY_BOTH(64, 32, 32, 33, 34, 35, 36)
WGMMA_STATIONARY_BOTH(112, 56, 56, 57, 58, 59, 60)
