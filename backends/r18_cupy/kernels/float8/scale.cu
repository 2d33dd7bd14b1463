// float32 to e4m3: the nearest number to x / scale, saturated.
// 1. `scale_elements`: a thread takes 4 elements, in any layout that stays what it is.
// 2. `scale_rgb_to_nhwc`: images in NCHW to NHWC; a thread takes four adjacent pixels of the three
//    planes and writes their twelve bytes.
// 3. `scale_any_to_nhwc`: the same of any image, one thread per element.
//
// Constraints: `scale_rgb_to_nhwc` needs planes of whole vectors of four pixels.
#include "common/dependent_launch.cuh"
#include "float8/e4m3.cuh"

constexpr int RUN = 4;  // elements per thread
constexpr int CHANNELS = 3;
constexpr int PIXELS = 4;  // per thread, of RGB

__device__ __forceinline__ unsigned char scaled(float x, float scale) {
  return to_e4m3(__fdiv_rn(x, scale));
}

extern "C" __global__ void __launch_bounds__(256)
scale_elements(const float* __restrict__ x, const float* __restrict__ scale,
               unsigned char* __restrict__ out, const unsigned count) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned first = (blockIdx.x * blockDim.x + threadIdx.x) * RUN;
  if (first >= count) return;
  if (count - first < RUN) {
    for (unsigned i = first; i < count; ++i) out[i] = scaled(x[i], s);
    return;
  }
  const float4 four = *reinterpret_cast<const float4*>(x + first);
  *reinterpret_cast<uchar4*>(out + first) = make_uchar4(scaled(four.x, s), scaled(four.y, s),
                                                        scaled(four.z, s), scaled(four.w, s));
}

// RGB images of `runs` vectors of four pixels; `threads` vectors in all. Neighbouring threads read
// adjacent vectors of each plane. Their stores are 12 bytes apart, but together use every byte.
extern "C" __global__ void __launch_bounds__(256)
scale_rgb_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                  unsigned char* __restrict__ out, const unsigned threads, const unsigned runs) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned run = blockIdx.x * blockDim.x + threadIdx.x;
  if (run >= threads) return;
  const unsigned image = run / runs;
  const float4* planes = reinterpret_cast<const float4*>(x) + image * CHANNELS * runs;
  const unsigned at = run - image * runs;
  struct alignas(4) {
    unsigned char at[CHANNELS * PIXELS];
  } bytes;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    const float4 four = planes[c * runs + at];
    bytes.at[c] = scaled(four.x, s);
    bytes.at[CHANNELS + c] = scaled(four.y, s);
    bytes.at[2 * CHANNELS + c] = scaled(four.z, s);
    bytes.at[3 * CHANNELS + c] = scaled(four.w, s);
  }
  const unsigned* words = reinterpret_cast<const unsigned*>(bytes.at);
  unsigned* to = reinterpret_cast<unsigned*>(out) + run * CHANNELS;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) to[i] = words[i];
}

// Any number of channels, any image of `area` pixels: one thread per element, in output order.
extern "C" __global__ void __launch_bounds__(256)
scale_any_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                  unsigned char* __restrict__ out, const unsigned count, const unsigned area,
                  const unsigned channels) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const unsigned pixel = at / channels, c = at - pixel * channels, image = pixel / area;
  out[at] = scaled(x[(image * channels + c) * area + (pixel - image * area)], s);
}
