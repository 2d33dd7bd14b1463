// Products of bytes on tensor cores: mma.sync.m16n8k32, sums in int32, modulo 2^32. sm_80 and
// later.
//
// Measured in bytes the fragments have the layout of every other type (mma/mma.cuh), so ldmatrix
// loads them: A has 16 rows and B 8, of 32 bytes of K each. Lane i holds of D: row i / 4 in d[0],
// d[1] and row i / 4 + 8 in d[2], d[3], at columns 2·(i % 4) and 2·(i % 4) + 1 (PTX ISA, "Matrix
// Fragments for mma.m16n8k32").
#pragma once

// T: the type of A's elements; B's are signed.
template <typename T>
__device__ __forceinline__ void multiply_add_bytes(int (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                   unsigned b1);

template <>
__device__ __forceinline__ void multiply_add_bytes<unsigned char>(int (&d)[4],
                                                                  const unsigned (&a)[4],
                                                                  unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add_bytes<signed char>(int (&d)[4],
                                                                const unsigned (&a)[4],
                                                                unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
