// Linear of float32 means and e4m3 weights, to float32 logits.
// 1. `slinear_warp_dot`, for small batches, bound by the bytes of the weights: a warp takes one
//    output feature and reads its weights once for ROWS samples. Lanes take every 32nd feature.
// 2. `slinear_tiled`, for large ones: a CTA computes 32 samples by 32 output features from tiles of
//    both in shared memory. A thread has four outputs.
//
// Sums of a sample are added in the same order whatever the batch is.
//
// Constraints: none.
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "float8/e4m3.cuh"
#include "ops/linear.cuh"

constexpr int LANES = 32;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
slinear_warp_dot(const float* __restrict__ x, const unsigned char* __restrict__ weight,
                 const float* __restrict__ bias, const float* __restrict__ multiplier,
                 float* __restrict__ out, const LinearShape p) {
  const int feature = blockIdx.x * WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  wait_for_previous_launch();
  if (feature >= p.out_features) return;  // a whole warp
  const int first = blockIdx.y * ROWS;
  const unsigned char* row = weight + (size_t)feature * p.features;
  float sum[ROWS] = {};
#pragma unroll 4
  for (int k = lane; k < p.features; k += LANES) {
    const float w = from_e4m3(row[k]);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      // Beyond the batch, repeat the last sample; its output is not written.
      sum[m] = fmaf(w, x[(size_t)min(first + m, p.n - 1) * p.features + k], sum[m]);
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

constexpr int TILE = 32, DEPTH = 32, THREADS = 256;
constexpr int MINE = TILE * TILE / THREADS;  // outputs of a thread: samples, of one feature

extern "C" __global__ void __launch_bounds__(THREADS)
slinear_tiled(const float* __restrict__ x, const unsigned char* __restrict__ weight,
              const float* __restrict__ bias, const float* __restrict__ multiplier,
              float* __restrict__ out, const LinearShape p) {
  __shared__ float samples[TILE][DEPTH + 1], features[TILE][DEPTH + 1];
  const int across = (p.out_features + TILE - 1) / TILE;
  const int sample0 = blockIdx.x / across * TILE, feature0 = blockIdx.x % across * TILE;
  const int column = threadIdx.x % TILE, line = threadIdx.x / TILE;  // line: 0 … 7
  wait_for_previous_launch();
  float sum[MINE] = {};
  for (int k0 = 0; k0 < p.features; k0 += DEPTH) {
    const int k = k0 + column;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int row = line + i * (TILE / MINE), sample = sample0 + row, feature = feature0 + row;
      const bool inside = k < p.features;
      samples[row][column] =
          inside && sample < p.n ? x[(size_t)sample * p.features + k] : 0.0f;
      features[row][column] = inside && feature < p.out_features
                                  ? from_e4m3(weight[(size_t)feature * p.features + k])
                                  : 0.0f;
    }
    __syncthreads();
    const int depth = min(DEPTH, p.features - k0);
    for (int i = 0; i < depth; ++i) {
      const float w = features[column][i];
#pragma unroll
      for (int m = 0; m < MINE; ++m) {
        sum[m] = fmaf(w, samples[line + m * (TILE / MINE)][i], sum[m]);
      }
    }
    __syncthreads();
  }
  const int feature = feature0 + column;
  if (feature >= p.out_features) return;
#pragma unroll
  for (int m = 0; m < MINE; ++m) {
    const int sample = sample0 + line + m * (TILE / MINE);
    if (sample < p.n) {
      out[(size_t)sample * p.out_features + feature] =
          fmaf(sum[m], multiplier[feature], bias[feature]);
    }
  }
}
