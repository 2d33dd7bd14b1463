// Convolution of int8 images with few channels under 7×7 windows, fused with max-pooling, on
// Hopper's integer tensor cores (wgmma). Writes NHWC. The image is int8 in NCHW, pixels in NHWC, or
// float32 in NCHW; of the latter two it makes int8 (stem_image.cuh).
//
// bytes/hopper/stem_kernel.cuh has the kernel. Sums begin with the bias; the largest of a window is
// requantised.
//
// Constraints: sm_90a; windows of 7×7, stride 2, padding 3; at most 4 channels; output channels in
// sixteens; pooling 3×3 with stride 2 and padding 1.
#include "integers/requantize.cuh"
#include "integers/stem_image.cuh"

constexpr int LINE_NOTES = 0;  // integers have no NaN to note
#include "bytes/hopper/stem.cuh"
#include "bytes/hopper/wgmma_registers.cuh"

using Number = int;
using Sums = int[COLUMNS / 2];  // of a thread; layout in hopper/wgmma.cuh

__device__ __forceinline__ int least() { return -2147483647 - 1; }
__device__ __forceinline__ int larger(int a, int b) { return max(a, b); }

struct Notes {
  __device__ __forceinline__ explicit Notes(int) {}
  static __device__ __forceinline__ void clear(unsigned) {}
  __device__ __forceinline__ void take(Quad (&)[OWN_LINES], unsigned, int) const {}
  static __device__ __forceinline__ bool any(unsigned) { return false; }
};

struct Channels {
  int bias[2];
  float multiplier[2];
  int low, high;

  __device__ __forceinline__ Channels(const ConvShape& p, const int* biases,
                                      const float* multipliers, int channel)
      : low(p.relu ? 0 : -128), high(p.relu ? 255 : 127) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bias[i] = channel + i < p.o ? biases[channel + i] : 0;
      multiplier[i] = channel + i < p.o ? multipliers[channel + i] : 0.0f;
    }
  }

  __device__ __forceinline__ unsigned integer(int sum, int channel) const {
    return saturated(scaled(sum, multiplier[channel]), low, high);
  }

  __device__ __forceinline__ unsigned pack(const int (&sums)[2][2]) const {
    const unsigned one = __byte_perm(integer(sums[0][0], 0), integer(sums[1][0], 1), 0x0040);
    const unsigned two = __byte_perm(integer(sums[0][1], 0), integer(sums[1][1], 1), 0x0040);
    return __byte_perm(one, two, 0x5410);
  }
};

__device__ __forceinline__ void multiply_lines(Sums& sums, const Weights& weights,
                                               const Channels& by, const Line (&lines)[WINDOW],
                                               bool) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = by.bias[i / 2 % 2];
  fence_registers(sums);
  wgmma_fence();
#pragma unroll
  for (int r = 0; r < WINDOW; ++r) {
    registers_wgmma<signed char, COLUMNS>(sums, weights[r], columns_at(lines[r]));
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_registers(sums);
}

#include "bytes/hopper/stem_kernel.cuh"

// `image_weight`: the table of pixels, the scale of float32, or null.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
qconv2d_maxpool2d_few_channels_wgmma(const unsigned char* x, const uint4* __restrict__ weight,
                                     const int* __restrict__ bias,
                                     const float* __restrict__ multiplier,
                                     const void* __restrict__ image_weight,
                                     unsigned char* __restrict__ out, const ConvShape p,
                                     const Task task) {
  convolve_and_pool(x, weight, bias, multiplier, image_weight, out, p, task);
}
