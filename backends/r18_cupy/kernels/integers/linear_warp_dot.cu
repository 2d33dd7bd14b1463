// Linear of integers for small batches, bound by the bytes of the weights.
// 1. A warp takes one output feature and reads its weights once for ROWS samples. The first 512
//    bytes of them are on their way before the previous launch has ended.
// 2. Each lane accumulates chunks of 16 products, a warp's width apart, in int32.
// 3. The lanes' sums are added; bias and multiplier make a float32 of them.
//
// Rows of the weight are padded with zeros to `pitch` bytes, whole chunks.
//
// Constraints: none; chunks of x need a multiple of 16 features, others are read byte by byte.
#include "common/dependent_launch.cuh"
#include "integers/dot.cuh"
#include "integers/requantize.cuh"
#include "integers/rows.cuh"
#include "ops/linear.cuh"

constexpr int LANES = 32;

__device__ __forceinline__ int warp_sum(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, value);
#else
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
#endif
}

// M samples from `first` on. `w` is the lane's first chunk of the feature's row, and `next` where
// that is in memory.
template <int M>
__device__ __forceinline__ void dots(const BYTE* x, const signed char* row, uint4 w, int bias,
                                     float multiplier, float* out, const LinearShape& p,
                                     const int pitch, int first, int feature) {
  const int lane = threadIdx.x % LANES;
  const bool whole = p.features % CHUNK == 0;
  int sum[M] = {};
  for (int k = lane * CHUNK; k < pitch; k += LANES * CHUNK) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      // Beyond the batch, repeat the last sample; its output is not written.
      const BYTE* sample = x + (size_t)min(first + m, p.n - 1) * p.features;
      sum[m] = dot16<BYTE>(chunk_of(sample, k, p.features, true, whole), w, sum[m]);
    }
    const int next = k + LANES * CHUNK;
    if (next < pitch) w = *reinterpret_cast<const uint4*>(row + next);
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const int total = warp_sum(sum[m]);
    if (lane == 0 && first + m < p.n) {
      out[(size_t)(first + m) * p.out_features + feature] = scaled(total + bias, multiplier);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
qlinear_warp_dot(const BYTE* __restrict__ x, const signed char* __restrict__ weight,
                 const int* __restrict__ bias, const float* __restrict__ multiplier,
                 float* __restrict__ out, const LinearShape p, const int pitch) {
  const int feature = blockIdx.x * WARPS + threadIdx.x / LANES;
  const int exists = min(feature, p.out_features - 1);
  const signed char* row = weight + (size_t)exists * pitch;
  const int k = threadIdx.x % LANES * CHUNK;
  const uint4 w = chunk_of(row, k, pitch, true, true);
  const int first_bias = bias[exists];
  const float factor = multiplier[exists];
  wait_for_previous_launch();
  if (feature >= p.out_features) return;  // a whole warp
  const int first = blockIdx.y * ROWS;
  if (p.n - first == 1) {
    dots<1>(x, row, w, first_bias, factor, out, p, pitch, first, feature);
  } else {
    dots<ROWS>(x, row, w, first_bias, factor, out, p, pitch, first, feature);
  }
}
