// Warp-level tensor-core instructions: `ldmatrix` and `mma.sync`. sm_80 and later. One instruction
// multiplies 16 rows of A by 8 rows of B (columns of Bᵀ) over 32 bytes of K: 16 values of fp16 or
// bf16, or 8 of tf32. Measured in bytes the fragments of all three types have the same layout, so
// ldmatrix serves tf32 too (PTX ISA, "Matrix Fragments for mma.m16n8k16", "... m16n8k8").
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Four 8×16-byte matrices: lane i gives the address of row i % 8 of matrix i / 8, and receives
// bytes 4·(i % 4) to 4·(i % 4) + 3 of row i / 4 of each.
__device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// A's fragment: matrices (rows 0-7, low 16 bytes), (rows 8-15, low), (0-7, high), (8-15, high);
// b0, b1: (rows 0-7 of B, low), (0-7, high). Lane i holds of D: row i / 4 in d[0], d[1] and row
// i / 4 + 8 in d[2], d[3], at columns 2·(i % 4) and 2·(i % 4) + 1.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1);

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&d)[4], const unsigned (&a)[4],
                                                     unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4],
                                                            unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D = A·Bᵀ, whatever D was.
__device__ __forceinline__ void multiply_halves(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// float is multiplied as tf32. The hardware ignores the low 13 bits of A and B, so operands not
// rounded by `round_operand` are truncated.
template <>
__device__ __forceinline__ void multiply_add<float>(float (&d)[4], const unsigned (&a)[4],
                                                    unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A fragment register rounded to what the hardware multiplies: to nearest, ties away from zero.
template <typename T>
__device__ __forceinline__ unsigned round_operand(unsigned bits) {
  return bits;
}
template <>
__device__ __forceinline__ unsigned round_operand<float>(unsigned bits) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}
