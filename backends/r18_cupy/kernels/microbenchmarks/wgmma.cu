// Peak rate of `wgmma`, for `r18 roofline --measure`. sm_90a only.
//
// 1. The CTA fills shared memory with random operands, once: STAGES tiles of A and B.
// 2. Each warpgroup multiplies its 64 rows of A by the 256 rows of B, tile after tile, into the same
//    accumulators. At most two rounds are in flight.
// 3. Every thread writes the sum of its accumulators.
//
// OPERAND: __half, __nv_bfloat16, float (tf32), Bytes (int8 by uint8) or E4m3. One CTA fills a
// multiprocessor. The data has no meaning, so tiles are not swizzled: any random bytes will do.
#include "bytes/hopper/wgmma.cuh"
#include "hopper/tma.cuh"

struct Bytes {};

#define WGMMA_ACC_128 WGMMA_ACC_112, WGMMA_RUN_16(112)
WGMMA_OF_EACH_TYPE(256, 128, 128, 129)
WGMMA(wgmma, 1, E4m3, 256, "k32.f32.e4m3.e4m3", 128, 128, 129, "")

constexpr int N = 256, WARPGROUPS = 2, STAGES = 4;
constexpr int ROW = 128, K_STEPS = ROW / 32;  // bytes of K; an instruction multiplies 32 of them
constexpr int A_NBYTES = 64 * ROW, B_NBYTES = N * ROW;
constexpr int STAGE_NBYTES = WARPGROUPS * A_NBYTES + B_NBYTES;
static_assert(STAGES * STAGE_NBYTES <= 227 * 1024, "the tiles fit in shared memory");

template <typename T>
struct Accumulator {
  using Type = float;
  static __device__ __forceinline__ void multiply(float (&d)[N / 2], unsigned long long a,
                                                  unsigned long long b) {
    wgmma<T, N>(d, a, b);
  }
};
template <>
struct Accumulator<Bytes> {
  using Type = int;
  static __device__ __forceinline__ void multiply(int (&d)[N / 2], unsigned long long a,
                                                  unsigned long long b) {
    wgmma_bytes<unsigned char, N>(d, a, b, 1);
  }
};
using Products = Accumulator<OPERAND>;

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128, 1)
wgmma_products(const uint4* __restrict__ operands, Products::Type* __restrict__ out,
               const int repeats) {
  extern __shared__ __align__(1024) unsigned char shared[];
  for (int i = threadIdx.x; i < STAGES * STAGE_NBYTES / 16; i += WARPGROUPS * 128) {
    reinterpret_cast<uint4*>(shared)[i] = operands[i];
  }
  fence_async_proxy();  // wgmma reads them
  __syncthreads();

  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const unsigned long long b = swizzle_128b_descriptor(address + WARPGROUPS * A_NBYTES);
  const unsigned long long a = swizzle_128b_descriptor(address + threadIdx.x / 128 * A_NBYTES);
  Products::Type d[N / 2] = {};
  wgmma_fence();
#pragma unroll 2  // so that the assembler sees the products of two rounds in flight
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
#pragma unroll
      for (int k = 0; k < K_STEPS; ++k) {
        const unsigned long long offset = stage * (STAGE_NBYTES / 16) + k * K_STEP;
        Products::multiply(d, a + offset, b + offset);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();

  Products::Type sum = 0;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum += d[i];
  out[blockIdx.x * WARPGROUPS * 128 + threadIdx.x] = sum;
}
