// Linear of float32 means and e4m3 weights, to float32 logits.
// 1. `slinear_warp_dot`, for small batches, bound by the bytes of the weights: a warp takes one
//    output feature and reads its weights once for ROWS samples. Lanes take every 32nd four of
//    features where rows are made of fours, else every 32nd feature.
// 2. `slinear_tiled`, for large ones: a CTA computes 32 samples by 32 output features from tiles of
//    both in shared memory. A thread has eight outputs, of one feature.
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

constexpr int TILE = 32, DEPTH = 128, THREADS = 128;  // of features, DEPTH at a time
constexpr int MINE = TILE * TILE / THREADS;  // outputs of a thread: samples, of one feature
constexpr int LINES = TILE / MINE;                    // warps; a warp's samples are LINES apart

extern "C" __global__ void __launch_bounds__(THREADS)
slinear_tiled(const float* __restrict__ x, const unsigned char* __restrict__ weight,
              const float* __restrict__ bias, const float* __restrict__ multiplier,
              float* __restrict__ out, const LinearShape p) {
  __shared__ float4 samples[TILE][DEPTH / 4];    // read by all lanes at once
  __shared__ float features[DEPTH][TILE + 1];
  const int across = (p.out_features + TILE - 1) / TILE;
  const int sample0 = blockIdx.x / across * TILE, feature0 = blockIdx.x % across * TILE;
  const int column = threadIdx.x % TILE, line = threadIdx.x / TILE;
  wait_for_previous_launch();
  float sum[MINE] = {};
  for (int k0 = 0; k0 < p.features; k0 += DEPTH) {
#pragma unroll
    for (int i = 0; i < MINE * (DEPTH / TILE); ++i) {
      const int row = line + i % MINE * LINES, at = column + i / MINE * TILE, k = k0 + at;
      const int sample = sample0 + row, feature = feature0 + row;
      const bool inside = k < p.features;
      reinterpret_cast<float*>(samples[row])[at] =
          inside && sample < p.n ? x[(size_t)sample * p.features + k] : 0.0f;
      features[at][row] = inside && feature < p.out_features
                              ? from_e4m3(weight[(size_t)feature * p.features + k])
                              : 0.0f;
    }
    __syncthreads();
    const int fours = (min(DEPTH, p.features - k0) + 3) / 4;  // zeros follow the features
#pragma unroll 4
    for (int i = 0; i < fours; ++i) {
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = features[4 * i + j][column];
#pragma unroll
      for (int m = 0; m < MINE; ++m) {
        const float4 of = samples[line + m * LINES][i];
        sum[m] = fmaf(w[0], of.x, sum[m]);
        sum[m] = fmaf(w[1], of.y, sum[m]);
        sum[m] = fmaf(w[2], of.z, sum[m]);
        sum[m] = fmaf(w[3], of.w, sum[m]);
      }
    }
    __syncthreads();
  }
  const int feature = feature0 + column;
  if (feature >= p.out_features) return;
#pragma unroll
  for (int m = 0; m < MINE; ++m) {
    const int sample = sample0 + line + m * LINES;
    if (sample < p.n) {
      out[(size_t)sample * p.out_features + feature] =
          fmaf(sum[m], multiplier[feature], bias[feature]);
    }
  }
}
