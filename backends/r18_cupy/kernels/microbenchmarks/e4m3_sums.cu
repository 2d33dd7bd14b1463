// Sums of e4m3 products by `wgmma`: D = A·Bᵀ of 64 rows each, over `steps` instructions of 32
// products. Shows at how many bits the unit adds, since D is written as the registers hold it.
// sm_90a only.
#include "bytes/hopper/wgmma.cuh"
#include "hopper/tma.cuh"

constexpr int N = 64, ROW = 128;  // rows of A and of B; bytes of K
constexpr int CHUNKS = ROW / 16;

// Row-major rows of 16-byte chunks, swizzled as TMA writes them.
__device__ __forceinline__ void fill(uint4* tile, const uint4* rows) {
  for (int i = threadIdx.x; i < N * CHUNKS; i += 128) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    tile[row * CHUNKS + (chunk ^ row % 8)] = rows[i];
  }
}

extern "C" __global__ void __launch_bounds__(128)
e4m3_sums(const uint4* __restrict__ a, const uint4* __restrict__ b, float* __restrict__ out,
          const int steps) {
  __shared__ __align__(1024) uint4 tiles[2][N * CHUNKS];
  fill(tiles[0], a);
  fill(tiles[1], b);
  fence_async_proxy();  // wgmma reads them
  __syncthreads();

  const unsigned long long of_a =
      row_descriptor<ROW>(static_cast<unsigned>(__cvta_generic_to_shared(tiles[0])));
  const unsigned long long of_b =
      row_descriptor<ROW>(static_cast<unsigned>(__cvta_generic_to_shared(tiles[1])));
  float d[N / 2] = {};
  wgmma_fence();
  for (int step = 0; step < steps; ++step) {
    wgmma_bytes<E4m3, N>(d, of_a + step * K_STEP, of_b + step * K_STEP, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");  // not before the wait
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    out[(row + i / 2 % 2 * 8) * N + column] = d[i];
  }
}
