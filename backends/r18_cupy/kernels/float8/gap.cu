// Global average pooling of e4m3 numbers, to means in float32.
// 1. NCHW: a warp adds a plane. NHWC: eight warps add 128 channels of an image, each lane four of
//    them; where channels are not whole words, 32 channels.
// 2. The warps' sums are added in shared memory, in a fixed order, and divided.
//
// Constraints: none.
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "float8/e4m3.cuh"

constexpr int LANES = 32, WARPS = 8;

extern "C" __global__ void __launch_bounds__(256)
sgap_nchw(const unsigned char* __restrict__ x, float* __restrict__ out, const int planes,
          const int pixels) {
  wait_for_previous_launch();
  const unsigned plane = blockIdx.x * WARPS + threadIdx.x / LANES;
  if (plane >= planes) return;  // a whole warp
  const unsigned char* of = x + (size_t)plane * pixels;
  float sum = 0.0f;
  for (unsigned p = threadIdx.x % LANES; p < pixels; p += LANES) sum += from_e4m3(of[p]);
  sum = reduce_lanes<LANES>(sum, Sum());
  if (threadIdx.x % LANES == 0) out[plane] = sum / pixels;
}

// W channels a lane: 4, whose bytes are one word, or 1.
template <int W>
__device__ __forceinline__ void means(const unsigned char* x, float* out, int channels,
                                      int pixels) {
  __shared__ float partial[WARPS][LANES * W];
  const unsigned tiles = (channels + LANES * W - 1) / (LANES * W);
  const unsigned n = blockIdx.x / tiles;
  const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const unsigned channel = (blockIdx.x % tiles * LANES + lane) * W;
  const bool exists = channel < channels;

  float sum[W] = {};
  if (exists) {
    const unsigned char* column = x + (size_t)n * pixels * channels + channel;
#pragma unroll 4
    for (unsigned p = warp; p < pixels; p += WARPS) {
      if constexpr (W == 4) {
        const unsigned word = *reinterpret_cast<const unsigned*>(column + (size_t)p * channels);
        const float2 first = from_e4m3_pair(word), second = from_e4m3_pair(word >> 16);
        sum[0] += first.x, sum[1] += first.y, sum[2] += second.x, sum[3] += second.y;
      } else {
        sum[0] += from_e4m3(column[(size_t)p * channels]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < W; ++i) partial[warp][lane * W + i] = sum[i];
  __syncthreads();
  if (warp > 0 || !exists) return;
#pragma unroll
  for (int i = 0; i < W; ++i) {
#pragma unroll
    for (int other = 1; other < WARPS; ++other) sum[i] += partial[other][lane * W + i];
    out[(size_t)n * channels + channel + i] = sum[i] / pixels;
  }
}

extern "C" __global__ void __launch_bounds__(256)
sgap_nhwc(const unsigned char* __restrict__ x, float* __restrict__ out, const int channels,
          const int pixels) {
  wait_for_previous_launch();
  if (channels % 4 == 0) {
    means<4>(x, out, channels, pixels);
  } else {
    means<1>(x, out, channels, pixels);
  }
}
