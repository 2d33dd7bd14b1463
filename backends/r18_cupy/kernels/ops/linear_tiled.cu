// Linear for large batches, a tiled GEMM on CUDA cores.
// 1. A CTA copies BLOCK_M samples and BLOCK_N features, 32 columns at a time, to shared memory; the
//    next tile is loaded to registers at the same time.
// 2. Each thread accumulates THREAD_M × THREAD_N outputs in registers.
// 3. Bias is added, and outputs are rounded once.
//
// Constraints: BLOCK_M and BLOCK_N are multiples of SIDE.
#include "common/dependent_launch.cuh"
#include "ops/linear.cuh"
#include "common/storage.cuh"

constexpr int LANES = 32;  // BLOCK_K: a warp loads a row of a tile, one element per lane
constexpr int SIDE = 16;   // threads along each side of a CTA's tile
constexpr int THREADS = SIDE * SIDE;
constexpr int THREAD_M = BLOCK_M / SIDE;
constexpr int THREAD_N = BLOCK_N / SIDE;
// Rows are 36 words apart: eight lanes that read 16 bytes of eight rows touch all 32 banks once.
constexpr int STRIDE = LANES + 4;
static_assert(BLOCK_M % SIDE == 0 && BLOCK_N % SIDE == 0, "threads share a tile evenly");
static_assert(STRIDE % 4 == 0 && STRIDE % 32 == 4, "rows are aligned, and shifted by four banks");

// Rows [first, first + ROWS) of a row-major matrix, columns [k, k + 32), on their way to a tile.
// Elements beyond the matrix are zero: past the last column both operands are zero, so no infinity
// meets a zero. Outputs of extra rows are not written.
template <int ROWS>
struct Stage {
  static constexpr int WARPS = THREADS / LANES;
  static constexpr int COUNT = ROWS / WARPS;
  static_assert(ROWS % WARPS == 0, "warps share the rows evenly");
  float value[COUNT];

  __device__ __forceinline__ void fetch(const STORAGE* matrix, int rows, int columns, int first,
                                        int k) {
    const int column = k + threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = first + i * WARPS + threadIdx.x / LANES;
      const bool exists = row < rows && column < columns;
      value[i] = exists ? to_float(matrix[(size_t)row * columns + column]) : 0.0f;
    }
  }

  __device__ __forceinline__ void put(float (*tile)[STRIDE]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      tile[i * WARPS + threadIdx.x / LANES][threadIdx.x % LANES] = value[i];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
linear_tiled(const STORAGE* __restrict__ x, const STORAGE* __restrict__ weight,
             const float* __restrict__ bias, STORAGE* __restrict__ out, const LinearShape p) {
  wait_for_previous_launch();
  __shared__ __align__(16) float samples[BLOCK_M][STRIDE];
  __shared__ __align__(16) float factors[BLOCK_N][STRIDE];
  const unsigned across = (p.out_features + BLOCK_N - 1) / BLOCK_N;
  const int n0 = blockIdx.x / across * BLOCK_M;
  const int o0 = blockIdx.x % across * BLOCK_N;
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;

  float sum[THREAD_M][THREAD_N] = {};
  Stage<BLOCK_M> from_x;
  Stage<BLOCK_N> from_weight;
  from_x.fetch(x, p.n, p.features, n0, 0);
  from_weight.fetch(weight, p.out_features, p.features, o0, 0);
  for (int k = 0; k < p.features; k += LANES) {
    __syncthreads();  // the previous tile has been read
    from_x.put(samples);
    from_weight.put(factors);
    __syncthreads();
    // Load the next tile while this one is multiplied; zeros after the last.
    from_x.fetch(x, p.n, p.features, n0, k + LANES);
    from_weight.fetch(weight, p.out_features, p.features, o0, k + LANES);
#pragma unroll
    for (int q = 0; q < LANES; q += 4) {
      float4 a[THREAD_M], b[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
        a[i] = *reinterpret_cast<const float4*>(&samples[i * SIDE + ty][q]);
      }
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) {
        b[j] = *reinterpret_cast<const float4*>(&factors[j * SIDE + tx][q]);
      }
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) {
          sum[i][j] = fmaf(a[i].x, b[j].x, sum[i][j]);
          sum[i][j] = fmaf(a[i].y, b[j].y, sum[i][j]);
          sum[i][j] = fmaf(a[i].z, b[j].z, sum[i][j]);
          sum[i][j] = fmaf(a[i].w, b[j].w, sum[i][j]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int n = n0 + i * SIDE + ty, o = o0 + j * SIDE + tx;
      if (n < p.n && o < p.out_features) {
        out[(size_t)n * p.out_features + o] = from_float<STORAGE>(sum[i][j] + bias[o]);
      }
    }
  }
}
