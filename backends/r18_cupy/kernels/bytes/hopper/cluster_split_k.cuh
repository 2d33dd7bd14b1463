// Split-K of convolutions of bytes within a cluster: each CTA adds up its share of K, then the
// cluster adds the shares, in their order.
// 1. Every CTA stores its sums to its own shared memory, where the stages were.
// 2. Each CTA reads a share of the tile's pixels from the shared memory of all CTAs, finishes their
//    sums and writes the outputs. The residual is loaded while the CTAs wait for each other.
//
// Included by gather_kernel.cuh.
#pragma once
#include "hopper/cluster.cuh"

constexpr int CHUNK = 4;  // channels per thread and access: 16 bytes of sums
// Four channels of padding spread a warp's sums over all banks.
constexpr int PITCH = TILE_M + 4;
constexpr int CHUNKS = TILE_M / CHUNK;                         // per pixel
constexpr int ROWS_OUT = CONSUMERS / CHUNKS;                   // pixels per iteration
constexpr int SHARE = (TILE_N + TILE_PARTS - 1) / TILE_PARTS;  // pixels that a CTA writes
constexpr int ITERATIONS = (SHARE + ROWS_OUT - 1) / ROWS_OUT;

static_assert(TILE_N * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the sums reuse the memory of the stages");
static_assert(CONSUMERS % CHUNKS == 0, "a thread writes the same channels of each pixel");

template <typename T>
struct alignas(8) Pair {
  T first, second;
};

// Transposed to [pixel][channel], channels in their own order.
template <typename T>
__device__ __forceinline__ void store_sums(const T (&sums)[GROUP_N / 2], const Part& part,
                                           T* tile) {
  T* at = tile + (part.n + threadIdx.x % 4 * 2) * PITCH + channel_of(part.m);
#pragma unroll
  for (int j = 0; j < GROUP_N / 8; ++j) {
    T* pixel = at + 8 * j * PITCH;
    *reinterpret_cast<Pair<T>*>(pixel) = {sums[4 * j], sums[4 * j + 2]};
    *reinterpret_cast<Pair<T>*>(pixel + PITCH) = {sums[4 * j + 1], sums[4 * j + 3]};
  }
}

// `cluster_load` gives the bits of sums.
__device__ __forceinline__ void from_bits(float bits, float& sum) { sum = bits; }
__device__ __forceinline__ void from_bits(float bits, int& sum) { sum = __float_as_int(bits); }

// One chunk of sums, at shared memory address `place` of every CTA, added over the splits.
template <typename T>
__device__ __forceinline__ void sum_splits(T (&sums)[CHUNK], unsigned place) {
  T part[TILE_PARTS][CHUNK];  // all loads are issued before the first is needed
#pragma unroll
  for (int i = 0; i < TILE_PARTS; ++i) {
    const float4 bits = cluster_load(cluster_address(place, i));
    from_bits(bits.x, part[i][0]), from_bits(bits.y, part[i][1]);
    from_bits(bits.z, part[i][2]), from_bits(bits.w, part[i][3]);
  }
#pragma unroll
  for (int v = 0; v < CHUNK; ++v) {
    sums[v] = part[0][v];
#pragma unroll
    for (int i = 1; i < TILE_PARTS; ++i) sums[v] += part[i][v];
  }
}

// The reduction and epilogue. All consumer threads, once all stages have been read; the producer
// warp may have exited.
template <typename T>
__device__ __forceinline__ void reduce_split_k(const T (&sums)[GROUP_N / 2], const Part& part,
                                               unsigned char* shared, const ConvShape& p,
                                               unsigned pixel0, int channel0,
                                               const Factors& factors,
                                               const unsigned char* residual, unsigned char* out) {
  T* tile = reinterpret_cast<T*>(shared);
  store_sums(sums, part, tile);
  __syncwarp();
  cluster_arrive();

  const int share = (int)blockIdx.y * SHARE, chunk = threadIdx.x % CHUNKS * CHUNK;
  const int channel = channel0 + chunk, row0 = share + threadIdx.x / CHUNKS;
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const int rows = min(min(share + SHARE, TILE_N), (int)(pixels - pixel0));
  const int end = channel < p.o ? rows : 0;
  const size_t start = (size_t)(pixel0 + row0) * p.o + channel, stride = (size_t)ROWS_OUT * p.o;
  const ChunkFinishing by(p, factors, channel);
  unsigned residuals[ITERATIONS] = {};  // four bytes each
  wait_for_previous_launch();
  if (by.has_residual) {
#pragma unroll
    for (int i = 0; i < ITERATIONS; ++i) {
      if (row0 + i * ROWS_OUT >= end) break;
      residuals[i] = *reinterpret_cast<const unsigned*>(residual + (start + i * stride));
    }
  }
  __syncwarp();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < ITERATIONS; ++i) {
    const int row = row0 + i * ROWS_OUT;
    if (row >= end) break;
    T whole[CHUNK];
    sum_splits(whole, shared_address(tile + row * PITCH + chunk));
    *reinterpret_cast<unsigned*>(out + (start + i * stride)) = by(whole, residuals[i]);
  }
  // No CTA may exit while others read its sums. The arrival need not order memory: each value that
  // was loaded has been used by a store above, so it has been read.
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
}
