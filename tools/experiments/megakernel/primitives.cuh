// The instructions that the megakernel uses beyond those of `kernels/`. emulator.cpp has the same
// functions for a CPU, so that the kernel's own source runs there.
#pragma once
#include <cuda_fp16.h>

#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "mma/mma.cuh"

// Relaxed accesses at GPU scope go to the L2, and a location's values are seen in one order. What
// other CTAs of this launch write is read and written by these (and never by ld.global.nc).
__device__ __forceinline__ uint4 load_relaxed(const void* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
// Where `wanted`; else `v` stays. A predicate, as a branch around each load would serialise them.
__device__ __forceinline__ void load_relaxed_if(uint4& v, const void* at, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(at), "r"((unsigned)wanted)
      : "memory");
}
__device__ __forceinline__ uint2 load_relaxed_pair(const void* at) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(void* at, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_relaxed(void* at, const uint2& v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.x), "r"(v.y)
               : "memory");
}
__device__ __forceinline__ void store_relaxed(void* at, unsigned v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

extern __shared__ __align__(128) unsigned char shared_bytes[];
// Ordinary accesses to dynamic shared memory; `at` counts from its start.
template <typename T>
__device__ __forceinline__ T load_shared(int at) {
  return *reinterpret_cast<const T*>(shared_bytes + at);
}
template <typename T>
__device__ __forceinline__ void store_shared(int at, const T& v) {
  *reinterpret_cast<T*>(shared_bytes + at) = v;
}

// One matrix fewer than `load_matrices`: lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_two_matrices(unsigned& low, unsigned& high,
                                                  unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(low), "=r"(high)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
  const unsigned fragment[4] = {a.x, a.y, a.z, a.w};
  multiply_add<__half>(d, fragment, b0, b1);
}

__device__ __forceinline__ unsigned halves_of(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float2 floats_of(unsigned halves) {
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}
__device__ __forceinline__ float butterfly(float v, int distance) {
  return v + __shfl_xor_sync(0xffffffffu, v, distance);
}
__device__ __forceinline__ void store_half(void* at, float v) {
  *reinterpret_cast<__half*>(at) = __float2half_rn(v);
}

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}
__device__ __forceinline__ void pause() {}
__device__ __forceinline__ void nap() { __nanosleep(40); }

__device__ __forceinline__ unsigned shared_start() { return shared_address(shared_bytes); }
