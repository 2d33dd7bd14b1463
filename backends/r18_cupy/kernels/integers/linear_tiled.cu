// Linear of integers for large batches, a tiled GEMM of dp4a.
// 1. A CTA copies BLOCK_M samples and BLOCK_N features, 128 bytes of K at a time, to shared memory;
//    the next tile is loaded to registers at the same time.
// 2. Each thread accumulates THREAD_M × THREAD_N outputs in int32 registers.
// 3. Bias and multiplier make a float32 of each sum.
//
// Rows of the weight are padded with zeros to `pitch` bytes, whole chunks of 16.
//
// Constraints: BLOCK_M and BLOCK_N are multiples of the rows that the CTA copies at once.
#include "common/dependent_launch.cuh"
#include "integers/dot.cuh"
#include "integers/requantize.cuh"
#include "integers/rows.cuh"
#include "ops/linear.cuh"

constexpr int CHUNKS = 8;  // per row of a tile
constexpr int BLOCK_K = CHUNKS * CHUNK;
constexpr int SIDE = 16;  // threads along each side of a CTA's tile
constexpr int THREADS = SIDE * SIDE;
constexpr int AT_ONCE = THREADS / CHUNKS;  // rows that the CTA copies at once
constexpr int THREAD_M = BLOCK_M / SIDE;
constexpr int THREAD_N = BLOCK_N / SIDE;
// Rows are 36 words apart: eight lanes that read 16 bytes of eight rows touch all 32 banks once.
constexpr int STRIDE = CHUNKS + 1;  // in chunks
static_assert(BLOCK_M % SIDE == 0 && BLOCK_N % SIDE == 0, "threads share a tile evenly");
static_assert(BLOCK_M % AT_ONCE == 0 && BLOCK_N % AT_ONCE == 0, "each thread copies whole chunks");

// Rows [first, first + ROWS) of a row-major matrix, bytes [k, k + 128), on their way to a tile.
// Bytes beyond the matrix are zero; outputs of extra rows are not written.
template <int ROWS, typename T>
struct Stage {
  static constexpr int COUNT = ROWS / AT_ONCE;
  uint4 value[COUNT];

  __device__ __forceinline__ void fetch(const T* matrix, int rows, int columns, int pitch,
                                        int first, int k) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = first + i * AT_ONCE + threadIdx.x / CHUNKS;
      const bool exists = row < rows;
      value[i] = chunk_of(matrix + (exists ? (size_t)row * pitch : 0),
                          k + (int)(threadIdx.x % CHUNKS) * CHUNK, columns, exists,
                          pitch % CHUNK == 0);
    }
  }

  __device__ __forceinline__ void put(uint4 (*tile)[STRIDE]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      tile[i * AT_ONCE + threadIdx.x / CHUNKS][threadIdx.x % CHUNKS] = value[i];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
qlinear_tiled(const BYTE* __restrict__ x, const signed char* __restrict__ weight,
              const int* __restrict__ bias, const float* __restrict__ multiplier,
              float* __restrict__ out, const LinearShape p, const int pitch) {
  __shared__ uint4 samples[BLOCK_M][STRIDE];
  __shared__ uint4 factors[BLOCK_N][STRIDE];
  const unsigned across = (p.out_features + BLOCK_N - 1) / BLOCK_N;
  const int n0 = blockIdx.x / across * BLOCK_M;
  const int o0 = blockIdx.x % across * BLOCK_N;
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;

  int sum[THREAD_M][THREAD_N] = {};
  Stage<BLOCK_M, BYTE> from_x;
  Stage<BLOCK_N, signed char> from_weight;
  from_weight.fetch(weight, p.out_features, pitch, pitch, o0, 0);
  wait_for_previous_launch();
  from_x.fetch(x, p.n, p.features, p.features, n0, 0);
  for (int k = 0; k < p.features; k += BLOCK_K) {
    __syncthreads();  // the previous tile has been read
    from_x.put(samples);
    from_weight.put(factors);
    __syncthreads();
    // Load the next tile while this one is multiplied; zeros after the last.
    from_x.fetch(x, p.n, p.features, p.features, n0, k + BLOCK_K);
    from_weight.fetch(weight, p.out_features, pitch, pitch, o0, k + BLOCK_K);
#pragma unroll
    for (int q = 0; q < CHUNKS; ++q) {
      uint4 a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a[i] = samples[i * SIDE + ty][q];
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b[j] = factors[j * SIDE + tx][q];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sum[i][j] = dot16<BYTE>(a[i], b[j], sum[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int n = n0 + i * SIDE + ty, o = o0 + j * SIDE + tx;
      if (n < p.n && o < p.out_features) {
        out[(size_t)n * p.out_features + o] = scaled(sum[i][j] + bias[o], multiplier[o]);
      }
    }
  }
}
