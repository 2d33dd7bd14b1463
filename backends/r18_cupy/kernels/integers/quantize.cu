// float32 to int8: the nearest integer to x / scale, saturated. Divided, not multiplied by 1 / scale,
// which rounds twice and moves ties.
// 1. `quantize_elements`: a thread takes 16 elements, in any layout that stays what it is.
// 2. `quantize_rgb_to_nhwc`: images in NCHW to NHWC; a thread takes four adjacent pixels of the three
//    planes and writes their twelve bytes.
// 3. `quantize_any_to_nhwc`: the same of any image, one thread per element.
//
// Constraints: `quantize_rgb_to_nhwc` needs planes of whole vectors of four pixels.
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "integers/requantize.cuh"

constexpr int RUN = 16;     // elements per thread
constexpr int CHANNELS = 3;
constexpr int PIXELS = 4;   // per thread, of RGB

__device__ __forceinline__ int nearest(float x, float scale) {
  return saturated(__fdiv_rn(x, scale), -128, 127);
}

extern "C" __global__ void __launch_bounds__(256)
quantize_elements(const float* __restrict__ x, const float* __restrict__ scale,
                  signed char* __restrict__ out, const unsigned count) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned first = (blockIdx.x * blockDim.x + threadIdx.x) * RUN;
  if (first >= count) return;
  if (count - first < RUN) {
    for (unsigned i = first; i < count; ++i) out[i] = nearest(x[i], s);
    return;
  }
  Run<signed char, RUN> bytes;
#pragma unroll
  for (int i = 0; i < RUN; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(x + first + i);
    bytes.at[i] = nearest(four.x, s);
    bytes.at[i + 1] = nearest(four.y, s);
    bytes.at[i + 2] = nearest(four.z, s);
    bytes.at[i + 3] = nearest(four.w, s);
  }
  *reinterpret_cast<Run<signed char, RUN>*>(out + first) = bytes;
}

// RGB images of `runs` vectors of four pixels; `threads` vectors in all. Neighbouring threads read
// adjacent vectors of each plane. Their stores are 12 bytes apart, but together use every byte.
extern "C" __global__ void __launch_bounds__(256)
quantize_rgb_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                     signed char* __restrict__ out, const unsigned threads, const unsigned runs) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned run = blockIdx.x * blockDim.x + threadIdx.x;
  if (run >= threads) return;
  const unsigned image = run / runs;
  const float4* planes = reinterpret_cast<const float4*>(x) + image * CHANNELS * runs;
  const unsigned at = run - image * runs;
  struct alignas(4) {
    signed char at[CHANNELS * PIXELS];
  } bytes;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    const float4 four = planes[c * runs + at];
    bytes.at[c] = nearest(four.x, s);
    bytes.at[CHANNELS + c] = nearest(four.y, s);
    bytes.at[2 * CHANNELS + c] = nearest(four.z, s);
    bytes.at[3 * CHANNELS + c] = nearest(four.w, s);
  }
  const unsigned* words = reinterpret_cast<const unsigned*>(bytes.at);
  unsigned* to = reinterpret_cast<unsigned*>(out) + run * CHANNELS;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) to[i] = words[i];
}

// Any number of channels, any image of `area` pixels: one thread per element, in output order.
extern "C" __global__ void __launch_bounds__(256)
quantize_any_to_nhwc(const float* __restrict__ x, const float* __restrict__ scale,
                     signed char* __restrict__ out, const unsigned count, const unsigned area,
                     const unsigned channels) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const unsigned pixel = at / channels, c = at - pixel * channels, image = pixel / area;
  out[at] = nearest(x[(image * channels + c) * area + (pixel - image * area)], s);
}
