// Pixels to a network's input: bytes in NHWC, x * scale + shift by channel, stored in NCHW.
#include "common/vector.cuh"

constexpr int CHANNELS = 3;
constexpr int W = WIDTH<STORAGE>;  // pixels of a thread: 16 bytes of each channel

struct alignas(W) Bytes {
  static_assert(W <= 16, "a thread loads at most 16 bytes at once");
  unsigned char at[W];
};

// RGB, in images of `runs` times W pixels; `threads` runs in all. Neighbours store side by side in
// each plane. Their loads lie CHANNELS * W bytes apart; the three together leave no byte out.
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

// Any channels and any image of `area` pixels: a thread an element, in the order of the output.
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
