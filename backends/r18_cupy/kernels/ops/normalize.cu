// Pixels to a network's input: bytes in NHWC, x * scale + shift per channel, stored in NCHW.
// 1. RGB: a thread loads W adjacent pixels, 16 bytes of each output channel.
// 2. One FMA per element in float32, rounded once.
// 3. It stores one vector to each channel's plane.
//
// Constraints: planes of whole vectors; `normalize_any` takes other images and channel counts, one
// thread per element.
#include "common/vector.cuh"

constexpr int CHANNELS = 3;
constexpr int W = WIDTH<STORAGE>;  // pixels per thread: 16 bytes of each channel

struct alignas(W) Bytes {
  static_assert(W <= 16, "a thread loads at most 16 bytes at once");
  unsigned char at[W];
};

// RGB images of `runs` vectors of W pixels; `threads` vectors in all. Neighbouring threads store
// adjacent vectors. Their loads are CHANNELS * W bytes apart, but the three loads together use
// every byte.
extern "C" __global__ void __launch_bounds__(256)
normalize_rgb(const unsigned char* __restrict__ x, const float* __restrict__ scale,
              const float* __restrict__ shift, STORAGE* __restrict__ out, const unsigned threads,
              const unsigned runs) {
  const unsigned run = blockIdx.x * blockDim.x + threadIdx.x;
  if (run >= threads) return;
  const Bytes* source = reinterpret_cast<const Bytes*>(x) + run * CHANNELS;
  Bytes part[CHANNELS];
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) part[i] = source[i];
  const unsigned image = run / runs;
  const unsigned plane = image * CHANNELS * runs + (run - image * runs);  // in vectors
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    const float a = scale[c], b = shift[c];
    float value[W];
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const int byte = i * CHANNELS + c;
      value[i] = fmaf(part[byte / W].at[byte % W], a, b);
    }
    store(out + (plane + c * runs) * W, value);
  }
}

// Any number of channels, any image of `area` pixels: one thread per element, in output order.
extern "C" __global__ void __launch_bounds__(256)
normalize_any(const unsigned char* __restrict__ x, const float* __restrict__ scale,
              const float* __restrict__ shift, STORAGE* __restrict__ out, const unsigned threads,
              const unsigned area, const unsigned channels) {
  const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= threads) return;
  const unsigned plane = at / area, image = plane / channels;
  const unsigned pixel = image * area + (at - plane * area), c = plane - image * channels;
  out[at] = from_float<STORAGE>(fmaf(x[pixel * channels + c], scale[c], shift[c]));
}
