// `mma.sync` over half the K of mma.cuh: 16 rows of A by 8 rows of B over 8 values of fp16 or bf16
// (PTX ISA, "Matrix Fragments for mma.m16n8k8"). sm_80 and later.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// a0, a1: rows 0-7 and 8-15 of A, b: rows of B, all as ldmatrix gives them; d as in mma.cuh.
template <typename T>
__device__ __forceinline__ void multiply_add_narrow(float (&d)[4], unsigned a0, unsigned a1,
                                                    unsigned b);

template <>
__device__ __forceinline__ void multiply_add_narrow<__half>(float (&d)[4], unsigned a0, unsigned a1,
                                                            unsigned b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

template <>
__device__ __forceinline__ void multiply_add_narrow<__nv_bfloat16>(float (&d)[4], unsigned a0,
                                                                   unsigned a1, unsigned b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}
