// `wgmma` of bytes: D = A·Bᵀ + D, with A (weights) and B (activations) in shared memory. sm_90a
// only (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"). One
// instruction multiplies 32 bytes of K of each row.
//
// Matrices have rows of ROW bytes of K, 64 or 128, swizzled over as many as TMA writes them.
// N is a multiple of 16. The accumulators' layout is that of hopper/wgmma.cuh.
//
// NOTE: the unit adds products of e4m3 at 13 bits of fraction, whatever the registers hold.
#pragma once
#include "hopper/wgmma.cuh"

struct E4m3;  // the type of e4m3 operands

// The type of a sum of products. X is the type of B's elements. A's elements are int8 where B's are
// `signed char` or `unsigned char`, and e4m3 where B's are.
template <typename X>
struct SumOf { using type = int; };
template <>
struct SumOf<E4m3> { using type = float; };
template <typename X>
using Sum = typename SumOf<X>::type;

// Matrix descriptor (see hopper/wgmma.cuh): rows of 128 bytes, where chunk c of row i is stored at
// c ^ i % 8, aligned to 1024 bytes; or of 64 bytes, at c ^ i / 2 % 4, aligned to 512.
template <int ROW>
__device__ __forceinline__ unsigned long long row_descriptor(unsigned address) {
  static_assert(ROW == 64 || ROW == 128, "rows of 64 or 128 bytes are swizzled");
  constexpr unsigned long long SWIZZLE = ROW == 128 ? 1 : 2, EIGHT_ROWS = 8 * ROW / 16;
  return SWIZZLE << 62 | EIGHT_ROWS << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}

// Makes the compiler treat registers as read and written here. It does not know that `wgmma` writes
// them asynchronously, and would read them ahead of the wait.
__device__ __forceinline__ void touch(int& sum) { asm volatile("" : "+r"(sum)::"memory"); }
__device__ __forceinline__ void touch(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }
template <typename T, int COUNT>
__device__ __forceinline__ void fence_registers(T (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) touch(sums[i]);
}

// Without `accumulates`, D is not read: sums need no zeros to begin with.
template <typename X, int N>
__device__ __forceinline__ void wgmma_bytes(Sum<X> (&d)[N / 2], unsigned long long a,
                                            unsigned long long b, int accumulates);

#define WGMMA_NAMES_72 \
  WGMMA_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_80 \
  WGMMA_NAMES_72 ", " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_120 \
  WGMMA_NAMES_112 ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_128 \
  WGMMA_NAMES_120 ", " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

// R: the constraint of the accumulators' registers.
#define WGMMA_SUMS_8(R, i) \
  R(d[i]), R(d[i + 1]), R(d[i + 2]), R(d[i + 3]), R(d[i + 4]), R(d[i + 5]), R(d[i + 6]), R(d[i + 7])
#define WGMMA_SUMS_16(R, i) WGMMA_SUMS_8(R, i), WGMMA_SUMS_8(R, i + 8)
#define WGMMA_SUMS_32(R) WGMMA_SUMS_16(R, 0), WGMMA_SUMS_16(R, 16)
#define WGMMA_SUMS_48(R) WGMMA_SUMS_32(R), WGMMA_SUMS_16(R, 32)
#define WGMMA_SUMS_56(R) WGMMA_SUMS_48(R), WGMMA_SUMS_8(R, 48)
#define WGMMA_SUMS_64(R) WGMMA_SUMS_48(R), WGMMA_SUMS_16(R, 48)
#define WGMMA_SUMS_96(R) WGMMA_SUMS_64(R), WGMMA_SUMS_16(R, 64), WGMMA_SUMS_16(R, 80)
#define WGMMA_SUMS_104(R) WGMMA_SUMS_96(R), WGMMA_SUMS_8(R, 96)
#define WGMMA_SUMS_112(R) WGMMA_SUMS_104(R), WGMMA_SUMS_8(R, 104)
#define WGMMA_SUMS_120(R) WGMMA_SUMS_112(R), WGMMA_SUMS_8(R, 112)
#define WGMMA_SUMS_128(R) WGMMA_SUMS_120(R), WGMMA_SUMS_8(R, 120)

// `A`, `B`, `ADDS`: operand numbers of the descriptors and the flag, which follow the accumulators.
// `SIGNS`: neither matrix is negated. Integers have no such operands.
#define WGMMA_BYTES(N, COUNT, A, B, ADDS)                                                     \
  WGMMA_BYTES_OF(signed char, int, "+r", "s32.s8.s8", "", N, COUNT, A, B, ADDS)               \
  WGMMA_BYTES_OF(unsigned char, int, "+r", "s32.s8.u8", "", N, COUNT, A, B, ADDS)             \
  WGMMA_BYTES_OF(E4m3, float, "+f", "f32.e4m3.e4m3", ", 1, 1", N, COUNT, A, B, ADDS)
#define WGMMA_BYTES_OF(X, SUM, R, TYPES, SIGNS, N, COUNT, A, B, ADDS)                         \
  template <>                                                                                 \
  __device__ __forceinline__ void wgmma_bytes<X, N>(                                          \
      SUM (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulates) {         \
    asm volatile(                                                                             \
        "{\n.reg .pred add;\nsetp.ne.u32 add, %" #ADDS ", 0;\n"                               \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" WGMMA_NAMES_##COUNT          \
        "}, %" #A ", %" #B ", add" SIGNS ";\n}"                                               \
        : WGMMA_SUMS_##COUNT(R)                                                               \
        : "l"(a), "l"(b), "r"(accumulates));                                                  \
  }

WGMMA_BYTES(64, 32, 32, 33, 34)
WGMMA_BYTES(96, 48, 48, 49, 50)
WGMMA_BYTES(112, 56, 56, 57, 58)
WGMMA_BYTES(128, 64, 64, 65, 66)
WGMMA_BYTES(192, 96, 96, 97, 98)
WGMMA_BYTES(208, 104, 104, 105, 106)
WGMMA_BYTES(224, 112, 112, 113, 114)
WGMMA_BYTES(240, 120, 120, 121, 122)
WGMMA_BYTES(256, 128, 128, 129, 130)
