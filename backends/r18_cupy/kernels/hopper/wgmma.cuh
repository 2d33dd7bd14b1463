// Asynchronous tensor-core instructions of a warpgroup: D = A·Bᵀ + D with A and B in shared memory;
// and `setmaxnreg`. sm_90a only (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
// Instructions").
//
// A has 64 rows, B has N. One instruction multiplies 32 bytes of K of each row: 16 values of fp16
// or bf16, or 8 of tf32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Matrix descriptor: address, stride from one group of eight rows to the next (both in units of 16
// bytes), and swizzle mode.
//
// 128-byte swizzle: rows of 128 bytes, where 16-byte chunk c of row i is stored at chunk c ^ i % 8,
// as TMA writes them. The matrix is aligned to 1024 bytes.
__device__ __forceinline__ unsigned long long swizzle_128b_descriptor(unsigned address) {
  constexpr unsigned long long SWIZZLE_128B = 1ull << 62, EIGHT_ROWS = 1024 / 16;
  return SWIZZLE_128B | EIGHT_ROWS << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}

constexpr unsigned long long K_STEP = 32 / 16;  // from one K step's descriptor to the next

// No swizzle; 128 bytes from one group of eight rows to the next. `low` is the lower half of the
// descriptor: the address, and the distance from 16 bytes of K to the next 16, in units of 16 bytes
// (PTX ISA, "Strides"; "Canonical layouts", K-major without swizzling).
__device__ __forceinline__ unsigned long long no_swizzle_descriptor(unsigned low) {
  return (unsigned long long)(128 / 16) << 32 | low;
}

// Before the first product: makes the threads' writes to the accumulator registers visible to
// `wgmma`.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the products issued so far to a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the latest PENDING groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Accumulator layout: lane i of warp w holds rows 16·w + i / 4 (d[4j], d[4j + 1]) and 8 more (d[4j
// + 2], d[4j + 3]), at columns 8·j + 2·(i % 4) and the next.
template <typename T, int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], unsigned long long a,
                                      unsigned long long b);
// D = A·Bᵀ, whatever D was.
template <typename T, int N>
__device__ __forceinline__ void wgmma_begin(float (&d)[N / 2], unsigned long long a,
                                            unsigned long long b);

// The instruction lists every accumulator register.
#define WGMMA_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_28 \
  WGMMA_NAMES_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27"
#define WGMMA_NAMES_32 \
  WGMMA_NAMES_28 ", " \
  "%28, %29, %30, %31"
#define WGMMA_NAMES_48 \
  WGMMA_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47"
#define WGMMA_NAMES_56 \
  WGMMA_NAMES_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_60 \
  WGMMA_NAMES_56 ", " \
  "%56, %57, %58, %59"
#define WGMMA_NAMES_64 \
  WGMMA_NAMES_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define WGMMA_NAMES_88 \
  WGMMA_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, " \
  "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_96 \
  WGMMA_NAMES_88 ", " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_104 \
  WGMMA_NAMES_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_112 \
  WGMMA_NAMES_104 ", " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_116 \
  WGMMA_NAMES_112 ", " \
  "%112, %113, %114, %115"
#define WGMMA_RUN_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_RUN_8(i) WGMMA_RUN_4(i), WGMMA_RUN_4(i + 4)
#define WGMMA_RUN_16(i) WGMMA_RUN_8(i), WGMMA_RUN_8(i + 8)
#define WGMMA_ACC_16 WGMMA_RUN_16(0)
#define WGMMA_ACC_28 WGMMA_RUN_16(0), WGMMA_RUN_8(16), WGMMA_RUN_4(24)
#define WGMMA_ACC_32 WGMMA_RUN_16(0), WGMMA_RUN_16(16)
#define WGMMA_ACC_48 WGMMA_ACC_32, WGMMA_RUN_16(32)
#define WGMMA_ACC_56 WGMMA_ACC_48, WGMMA_RUN_8(48)
#define WGMMA_ACC_60 WGMMA_ACC_56, WGMMA_RUN_4(56)
#define WGMMA_ACC_64 WGMMA_ACC_48, WGMMA_RUN_16(48)
#define WGMMA_ACC_88 WGMMA_ACC_64, WGMMA_RUN_16(64), WGMMA_RUN_8(80)
#define WGMMA_ACC_96 WGMMA_ACC_64, WGMMA_RUN_16(64), WGMMA_RUN_16(80)
#define WGMMA_ACC_104 WGMMA_ACC_96, WGMMA_RUN_8(96)
#define WGMMA_ACC_112 WGMMA_ACC_104, WGMMA_RUN_8(104)
#define WGMMA_ACC_116 WGMMA_ACC_112, WGMMA_RUN_4(112)

// `ADDS`: 0 if D begins at zero, else 1. `A`, `B`: operand numbers of the descriptors, which follow
// the accumulators. `ORDER`: both matrices are K-major. tf32 supports nothing else, so its
// instruction has no such operands.
#define WGMMA(NAME, ADDS, T, N, STEP_AND_TYPES, COUNT, A, B, ORDER)                         \
  template <>                                                                               \
  __device__ __forceinline__ void NAME<T, N>(float (&d)[N / 2], unsigned long long a,       \
                                             unsigned long long b) {                        \
    asm volatile(                                                                           \
        "{\n.reg .pred add;\nsetp.eq.u32 add, " #ADDS ", 1;\n"                              \
        "wgmma.mma_async.sync.aligned.m64n" #N STEP_AND_TYPES " {" WGMMA_NAMES_##COUNT      \
        "}, %" #A ", %" #B ", add, 1, 1" ORDER ";\n}"                                       \
        : WGMMA_ACC_##COUNT                                                                \
        : "l"(a), "l"(b));                                                                  \
  }
#define WGMMA_OF_EACH_TYPE(N, COUNT, A, B)                                     \
  WGMMA(wgmma, 1, __half, N, "k16.f32.f16.f16", COUNT, A, B, ", 0, 0")         \
  WGMMA(wgmma, 1, __nv_bfloat16, N, "k16.f32.bf16.bf16", COUNT, A, B, ", 0, 0") \
  WGMMA(wgmma, 1, float, N, "k8.f32.tf32.tf32", COUNT, A, B, "")
#define WGMMA_BEGIN(N, COUNT, A, B) \
  WGMMA(wgmma_begin, 0, __half, N, "k16.f32.f16.f16", COUNT, A, B, ", 0, 0")

// The same with A in registers, as pairs of float16. A lane holds rows i / 4 and i / 4 + 8 of its
// warp's 16 rows: first columns 2·(i % 4) and the next of both rows, then these columns + 8. The
// registers must not change while products are in flight.
template <int N>
__device__ __forceinline__ void wgmma_registers(float (&d)[N / 2], const unsigned (&a)[4],
                                                unsigned long long b);
template <int N>
__device__ __forceinline__ void wgmma_registers_begin(float (&d)[N / 2], const unsigned (&a)[4],
                                                      unsigned long long b);

#define WGMMA_REGISTERS(NAME, ADDS, N, COUNT, A0, A1, A2, A3, B)                            \
  template <>                                                                               \
  __device__ __forceinline__ void NAME<N>(                                                  \
      float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {                    \
    asm volatile(                                                                           \
        "{\n.reg .pred add;\nsetp.eq.u32 add, " #ADDS ", 1;\n"                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" WGMMA_NAMES_##COUNT      \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", add, 1, 1, 0;\n}"            \
        : WGMMA_ACC_##COUNT                                                                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
  }

WGMMA_REGISTERS(wgmma_registers, 1, 32, 16, 16, 17, 18, 19, 20)
WGMMA_REGISTERS(wgmma_registers, 1, 64, 32, 32, 33, 34, 35, 36)
WGMMA_REGISTERS(wgmma_registers_begin, 0, 32, 16, 16, 17, 18, 19, 20)
WGMMA_REGISTERS(wgmma_registers_begin, 0, 64, 32, 32, 33, 34, 35, 36)

WGMMA_OF_EACH_TYPE(32, 16, 16, 17)
WGMMA_OF_EACH_TYPE(56, 28, 28, 29)
WGMMA_OF_EACH_TYPE(64, 32, 32, 33)
WGMMA_OF_EACH_TYPE(96, 48, 48, 49)
WGMMA_OF_EACH_TYPE(112, 56, 56, 57)
WGMMA_OF_EACH_TYPE(120, 60, 60, 61)
WGMMA_OF_EACH_TYPE(128, 64, 64, 65)
WGMMA_OF_EACH_TYPE(176, 88, 88, 89)
WGMMA_OF_EACH_TYPE(192, 96, 96, 97)
WGMMA_OF_EACH_TYPE(208, 104, 104, 105)
WGMMA_OF_EACH_TYPE(224, 112, 112, 113)
WGMMA_OF_EACH_TYPE(232, 116, 116, 117)
WGMMA_BEGIN(32, 16, 16, 17)
WGMMA_BEGIN(56, 28, 28, 29)
WGMMA_BEGIN(64, 32, 32, 33)
WGMMA_BEGIN(112, 56, 56, 57)
WGMMA_BEGIN(120, 60, 60, 61)
WGMMA_BEGIN(128, 64, 64, 65)

// Sets the register count of the warpgroup's threads, a multiple of 8. `acquire` blocks until other
// warpgroups of the CTA have released enough. Zero changes nothing.
template <int COUNT>
__device__ __forceinline__ void release_registers() {
  if constexpr (COUNT > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void acquire_registers() {
  if constexpr (COUNT > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
