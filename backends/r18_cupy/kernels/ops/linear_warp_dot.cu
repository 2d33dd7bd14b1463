// Linear for small batches, bound by the bytes of the weights.
// 1. A warp takes one output feature and reads its weights once for ROWS samples.
// 2. Each lane accumulates vectors of W elements, a warp's width apart.
// 3. A butterfly adds the lanes; bias is added, and the output is rounded once.
//
// Constraints: none; vectors need a multiple of W features, others are read element by element.
#include "common/dependent_launch.cuh"
#include "ops/linear.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

constexpr int LANES = 32;

// M samples from `first` on, W elements at a time. A sample's terms are added in the same order
// whatever M is, so its bits do not depend on the batch.
template <int M, int W>
__device__ __forceinline__ void dots(const STORAGE* x, const STORAGE* weight, const float* bias,
                                     STORAGE* out, const LinearShape& p, int first, int feature) {
  const int lane = threadIdx.x % LANES;
  const STORAGE* factors = weight + (size_t)feature * p.features;
  const STORAGE* sample[M];
  float sum[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    // Beyond the batch, repeat the last sample; its output is not written.
    sample[m] = x + (size_t)min(first + m, p.n - 1) * p.features;
    sum[m] = 0.0f;
  }
#pragma unroll 4
  for (int k = lane * W; k < p.features; k += LANES * W) {
    float w[W], v[W];
    load(w, factors + k);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      load(v, sample[m] + k);
#pragma unroll
      for (int i = 0; i < W; ++i) sum[m] = fmaf(w[i], v[i], sum[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float total = reduce_lanes<LANES>(sum[m], Sum());
    if (lane == 0 && first + m < p.n) {
      out[(size_t)(first + m) * p.out_features + feature] =
          from_float<STORAGE>(total + bias[feature]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
linear_warp_dot(const STORAGE* __restrict__ x, const STORAGE* __restrict__ weight,
                const float* __restrict__ bias, STORAGE* __restrict__ out, const LinearShape p) {
  constexpr int W = WIDTH<STORAGE>;
  const int feature = blockIdx.x * WARPS + threadIdx.x / LANES;
  wait_for_previous_launch();
  if (feature >= p.out_features) return;  // a whole warp
  const int first = blockIdx.y * ROWS;
  const bool alone = p.n - first == 1;
  // Rows are aligned only if each consists of whole vectors.
  if (p.features % W == 0) {
    if (alone) {
      dots<1, W>(x, weight, bias, out, p, first, feature);
    } else {
      dots<ROWS, W>(x, weight, bias, out, p, first, feature);
    }
  } else if (alone) {
    dots<1, 1>(x, weight, bias, out, p, first, feature);
  } else {
    dots<ROWS, 1>(x, weight, bias, out, p, first, feature);
  }
}
