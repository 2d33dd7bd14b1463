// Integer `wgmma`: D = A·Bᵀ + D in int32, with A (weights, int8) and B (activations, uint8 or int8)
// in shared memory. sm_90a only (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions"). One instruction multiplies 32 bytes of K of each row.
//
// Matrices have rows of ROW bytes of K, 64 or 128, swizzled over as many as TMA writes them.
// N is a multiple of 16. The accumulators' layout is that of hopper/wgmma.cuh.
#pragma once
#include "hopper/wgmma.cuh"

// Matrix descriptor (see hopper/wgmma.cuh): rows of 128 bytes, where chunk c of row i is stored at
// c ^ i % 8, aligned to 1024 bytes; or of 64 bytes, at c ^ i / 2 % 4, aligned to 512.
template <int ROW>
__device__ __forceinline__ unsigned long long row_descriptor(unsigned address) {
  static_assert(ROW == 64 || ROW == 128, "rows of 64 or 128 bytes are swizzled");
  constexpr unsigned long long SWIZZLE = ROW == 128 ? 1 : 2, EIGHT_ROWS = 8 * ROW / 16;
  return SWIZZLE << 62 | EIGHT_ROWS << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}

// B is of SIGNED bytes or not. Without `accumulates`, D is not read: sums need no zeros to begin
// with.
template <bool SIGNED, int N>
__device__ __forceinline__ void wgmma_bytes(int (&d)[N / 2], unsigned long long a,
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

#define WGMMA_SUMS_8(i) \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
  "+r"(d[i + 6]), "+r"(d[i + 7])
#define WGMMA_SUMS_16(i) WGMMA_SUMS_8(i), WGMMA_SUMS_8(i + 8)
#define WGMMA_SUMS_32 WGMMA_SUMS_16(0), WGMMA_SUMS_16(16)
#define WGMMA_SUMS_48 WGMMA_SUMS_32, WGMMA_SUMS_16(32)
#define WGMMA_SUMS_56 WGMMA_SUMS_48, WGMMA_SUMS_8(48)
#define WGMMA_SUMS_64 WGMMA_SUMS_48, WGMMA_SUMS_16(48)
#define WGMMA_SUMS_96 WGMMA_SUMS_64, WGMMA_SUMS_16(64), WGMMA_SUMS_16(80)
#define WGMMA_SUMS_104 WGMMA_SUMS_96, WGMMA_SUMS_8(96)
#define WGMMA_SUMS_112 WGMMA_SUMS_104, WGMMA_SUMS_8(104)
#define WGMMA_SUMS_120 WGMMA_SUMS_112, WGMMA_SUMS_8(112)
#define WGMMA_SUMS_128 WGMMA_SUMS_120, WGMMA_SUMS_8(120)

// `A`, `B`, `ADDS`: operand numbers of the descriptors and the flag, which follow the accumulators.
#define WGMMA_BYTES(N, COUNT, A, B, ADDS)         \
  WGMMA_BYTES_OF(true, "s8", N, COUNT, A, B, ADDS) \
  WGMMA_BYTES_OF(false, "u8", N, COUNT, A, B, ADDS)
#define WGMMA_BYTES_OF(SIGNED, TYPE, N, COUNT, A, B, ADDS)                                    \
  template <>                                                                                 \
  __device__ __forceinline__ void wgmma_bytes<SIGNED, N>(                                     \
      int (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulates) {         \
    asm volatile(                                                                             \
        "{\n.reg .pred add;\nsetp.ne.u32 add, %" #ADDS ", 0;\n"                               \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8." TYPE " {" WGMMA_NAMES_##COUNT    \
        "}, %" #A ", %" #B ", add;\n}"                                                        \
        : WGMMA_SUMS_##COUNT                                                                  \
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
