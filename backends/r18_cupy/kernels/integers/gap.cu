// Global average pooling of bytes: exact sums in int32, then one multiplier.
// 1. NCHW: a warp sums one plane. NHWC: eight warps of a CTA sum 32 × WIDTH channels of one image,
//    each every eighth pixel.
// 2. Sums are exact, so their order does not matter.
// 3. A sum is scaled, rounded and saturated once.
//
// Constraints: 256 threads per CTA.
#include "common/dependent_launch.cuh"
#include "integers/requantize.cuh"

constexpr int LANES = 32;
constexpr int WARPS = 8;
constexpr int MOST_WIDTH = 4;
static_assert(LANES * WARPS == 256, "the kernels are launched with 256 threads");

// The sum over a warp's lanes, in every lane.
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

// One warp per plane; its lanes read adjacent pixels.
extern "C" __global__ void __launch_bounds__(256)
qgap_nchw(const BYTE* __restrict__ x, const float* __restrict__ multiplier,
          BYTE* __restrict__ out, const int planes, const int pixels, const int low,
          const int high) {
  wait_for_previous_launch();
  const unsigned plane = blockIdx.x * WARPS + threadIdx.x / LANES;
  if (plane >= planes) return;  // a whole warp
  const unsigned lane = threadIdx.x % LANES;
  const BYTE* image = x + plane * pixels;
  int sum = 0;
#pragma unroll 4
  for (unsigned p = lane; p < pixels; p += LANES) sum += image[p];
  sum = warp_sum(sum);
  if (lane == 0) out[plane] = saturated(scaled(sum, *multiplier), low, high);
}

template <int WIDTH>
struct alignas(WIDTH) Channels {
  BYTE at[WIDTH];
};

// A CTA takes 32 × WIDTH adjacent channels of an image, each lane WIDTH of them. Pixels are aligned
// to WIDTH bytes.
template <int WIDTH>
__device__ __forceinline__ void mean(const BYTE* x, float multiplier, BYTE* out, unsigned channels,
                                     unsigned pixels, int low, int high,
                                     int (*partial)[LANES * MOST_WIDTH]) {
  constexpr unsigned ACROSS = LANES * WIDTH;
  const unsigned tiles = (channels + ACROSS - 1) / ACROSS;
  const unsigned n = blockIdx.x / tiles, first = blockIdx.x % tiles * ACROSS;
  const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  int sum[WIDTH] = {};
  if (first + lane * WIDTH < channels) {
    const BYTE* column = x + n * pixels * channels + first + lane * WIDTH;
#pragma unroll 8
    for (unsigned p = warp; p < pixels; p += WARPS) {
      const Channels<WIDTH> some =
          *reinterpret_cast<const Channels<WIDTH>*>(column + p * channels);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) sum[i] += some.at[i];
    }
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) partial[warp][lane * WIDTH + i] = sum[i];
  __syncthreads();
  const unsigned channel = first + threadIdx.x;
  if (threadIdx.x >= ACROSS || channel >= channels) return;
  int total = 0;
#pragma unroll
  for (int other = 0; other < WARPS; ++other) total += partial[other][threadIdx.x];
  out[n * channels + channel] = saturated(scaled(total, multiplier), low, high);
}

// The host launches a CTA per 32 × 4 channels of an image, or per 32 where pixels are not whole
// words.
extern "C" __global__ void __launch_bounds__(256)
qgap_nhwc(const BYTE* __restrict__ x, const float* __restrict__ multiplier,
          BYTE* __restrict__ out, const int channels, const int pixels, const int low,
          const int high) {
  __shared__ int partial[WARPS][LANES * MOST_WIDTH];
  const float factor = *multiplier;
  wait_for_previous_launch();
  if (channels % MOST_WIDTH == 0) {
    mean<MOST_WIDTH>(x, factor, out, channels, pixels, low, high, partial);
  } else {
    mean<1>(x, factor, out, channels, pixels, low, high, partial);
  }
}
