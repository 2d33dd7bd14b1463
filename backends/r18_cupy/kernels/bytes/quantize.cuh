// float32 to bytes: `Nearest::of(x, scale)` of each element. It divides: multiplied by 1 / scale, a
// number would be rounded twice, which moves ties.
// 1. `elements`: a thread takes RUN elements, in any layout that stays what it is.
// 2. `rgb_to_nhwc`: images in NCHW to NHWC; a thread takes four adjacent pixels of the three planes
//    and writes their twelve bytes.
// 3. `any_to_nhwc`: the same of any image, one thread per element.
//
// Constraints: `rgb_to_nhwc` needs planes of whole vectors of four pixels.
#pragma once
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"

constexpr int CHANNELS = 3;
constexpr int PIXELS = 4;   // per thread, of RGB

template <typename Nearest, int RUN, typename T>
__device__ __forceinline__ void elements(const float* x, const float* scale, T* out,
                                         unsigned count) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned first = (blockIdx.x * blockDim.x + threadIdx.x) * RUN;
  if (first >= count) return;
  if (count - first < RUN) {
    for (unsigned i = first; i < count; ++i) out[i] = Nearest::of(x[i], s);
    return;
  }
  Run<T, RUN> bytes;
#pragma unroll
  for (int i = 0; i < RUN; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(x + first + i);
    bytes.at[i] = Nearest::of(four.x, s);
    bytes.at[i + 1] = Nearest::of(four.y, s);
    bytes.at[i + 2] = Nearest::of(four.z, s);
    bytes.at[i + 3] = Nearest::of(four.w, s);
  }
  *reinterpret_cast<Run<T, RUN>*>(out + first) = bytes;
}

// RGB images of `runs` vectors of four pixels; `threads` vectors in all. Neighbouring threads read
// adjacent vectors of each plane. Their stores are 12 bytes apart, but together use every byte.
template <typename Nearest, typename T>
__device__ __forceinline__ void rgb_to_nhwc(const float* x, const float* scale, T* out,
                                            unsigned threads, unsigned runs) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned run = blockIdx.x * blockDim.x + threadIdx.x;
  if (run >= threads) return;
  const unsigned image = run / runs;
  const float4* planes = reinterpret_cast<const float4*>(x) + image * CHANNELS * runs;
  const unsigned at = run - image * runs;
  struct alignas(4) {
    T at[CHANNELS * PIXELS];
  } bytes;
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    const float4 four = planes[c * runs + at];
    bytes.at[c] = Nearest::of(four.x, s);
    bytes.at[CHANNELS + c] = Nearest::of(four.y, s);
    bytes.at[2 * CHANNELS + c] = Nearest::of(four.z, s);
    bytes.at[3 * CHANNELS + c] = Nearest::of(four.w, s);
  }
  const unsigned* words = reinterpret_cast<const unsigned*>(bytes.at);
  unsigned* to = reinterpret_cast<unsigned*>(out) + run * CHANNELS;
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) to[i] = words[i];
}

// Any number of channels, any image of `area` pixels: one thread per element, in output order.
template <typename Nearest, typename T>
__device__ __forceinline__ void any_to_nhwc(const float* x, const float* scale, T* out,
                                            unsigned count, unsigned area, unsigned channels) {
  const float s = *scale;
  wait_for_previous_launch();
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const unsigned pixel = at / channels, c = at - pixel * channels, image = pixel / area;
  out[at] = Nearest::of(x[(image * channels + c) * area + (pixel - image * area)], s);
}
