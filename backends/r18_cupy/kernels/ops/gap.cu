// Global average pooling.
// 1. NCHW: a warp sums one plane. NHWC: eight warps of a CTA sum 32 channels of one image.
// 2. Partial sums are added in a fixed tree that depends only on the extents of one plane, so a
//    sample's bits are the same in any batch.
// 3. The mean is rounded once.
//
// Constraints: 256 threads per CTA.
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/storage.cuh"

constexpr int LANES = 32;
constexpr int WARPS = 8;
static_assert(LANES * WARPS == 256, "the kernels are launched with 256 threads");

// One warp per plane; its lanes read adjacent pixels.
extern "C" __global__ void __launch_bounds__(256)
gap_nchw(const STORAGE* __restrict__ x, STORAGE* __restrict__ out, const int planes,
         const int pixels) {
  wait_for_previous_launch();
  const unsigned plane = blockIdx.x * WARPS + threadIdx.x / LANES;
  if (plane >= planes) return;  // a whole warp
  const unsigned lane = threadIdx.x % LANES;
  const STORAGE* image = x + plane * pixels;
  float sum = 0.0f;
#pragma unroll 4
  for (unsigned p = lane; p < pixels; p += LANES) sum += to_float(image[p]);
  sum = reduce_lanes<LANES>(sum, Sum());
  if (lane == 0) out[plane] = from_float<STORAGE>(sum / pixels);
}

// A CTA takes 32 adjacent channels of an image: each lane sums one channel over every eighth pixel,
// then the first warp adds the eight partial sums.
extern "C" __global__ void __launch_bounds__(256)
gap_nhwc(const STORAGE* __restrict__ x, STORAGE* __restrict__ out, const int channels,
         const int pixels) {
  wait_for_previous_launch();
  __shared__ float partial[WARPS][LANES];
  const unsigned tiles = (channels + LANES - 1) / LANES;
  const unsigned n = blockIdx.x / tiles;
  const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const unsigned channel = blockIdx.x % tiles * LANES + lane;
  const bool exists = channel < channels;

  float sum = 0.0f;
  if (exists) {
    const STORAGE* column = x + n * pixels * channels + channel;
#pragma unroll 4
    for (unsigned p = warp; p < pixels; p += WARPS) sum += to_float(column[p * channels]);
  }
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || !exists) return;
#pragma unroll
  for (int other = 1; other < WARPS; ++other) sum += partial[other][lane];
  out[n * channels + channel] = from_float<STORAGE>(sum / pixels);
}
