// Linear of float32 means and e4m3 weights for small batches, to float32 logits: bound by the bytes
// of the weights. A warp takes one output feature and reads its weights once for ROWS samples. Lanes
// take every 32nd four of features where rows are made of fours, else every 32nd feature.
//
// Sums of a sample are added in the same order whatever the batch is.
//
// Constraints: none.
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "float8/e4m3.cuh"
#include "ops/linear.cuh"

constexpr int LANES = 32;

// NOTE: without the second launch bound, ptxas aims at 40 registers on sm_86 and spills.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
slinear_warp_dot(const float* __restrict__ x, const unsigned char* __restrict__ weight,
                 const float* __restrict__ bias, const float* __restrict__ multiplier,
                 float* __restrict__ out, const LinearShape p) {
  const int feature = blockIdx.x * WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  wait_for_previous_launch();
  if (feature >= p.out_features) return;  // a whole warp
  const int first = blockIdx.y * ROWS;
  const unsigned char* row = weight + (size_t)feature * p.features;
  float sum[ROWS] = {};
  // Beyond the batch, repeat the last sample; its output is not written.
  const auto sample = [&](int m) { return x + (size_t)min(first + m, p.n - 1) * p.features; };
  if (p.features % 4 == 0) {
#pragma unroll 4
    for (int k = 4 * lane; k < p.features; k += 4 * LANES) {
      const unsigned four = *reinterpret_cast<const unsigned*>(row + k);
      const float2 lower = from_e4m3_pair((unsigned short)four);
      const float2 upper = from_e4m3_pair((unsigned short)(four >> 16));
#pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        const float4 of = *reinterpret_cast<const float4*>(sample(m) + k);
        sum[m] = fmaf(lower.x, of.x, sum[m]);
        sum[m] = fmaf(lower.y, of.y, sum[m]);
        sum[m] = fmaf(upper.x, of.z, sum[m]);
        sum[m] = fmaf(upper.y, of.w, sum[m]);
      }
    }
  } else {
#pragma unroll 4
    for (int k = lane; k < p.features; k += LANES) {
      const float w = from_e4m3(row[k]);
#pragma unroll
      for (int m = 0; m < ROWS; ++m) sum[m] = fmaf(w, sample(m)[k], sum[m]);
    }
  }
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    const float total = reduce_lanes<LANES>(sum[m], Sum());
    if (lane == 0 && first + m < p.n) {
      out[(size_t)(first + m) * p.out_features + feature] =
          fmaf(total, multiplier[feature], bias[feature]);
    }
  }
}
