// Max-pooling: padding never wins, NaN does.
// 1. NCHW: one thread per output. NHWC: one thread per 16 bytes of channels.
// 2. A thread clips its window to the image and takes the maximum of the rest.
//
// Constraints: padding is at most half of the window. NHWC with channels that are not whole
// vectors: one thread per channel.
#include "common/reduce.cuh"
#include "common/vector.cuh"

// The host's `POOL_SHAPE` in ops/maxpool2d.py mirrors it.
struct PoolShape {
  int n, c, h, w;              // input
  int oh, ow;                  // output
  int kh, kw, sh, sw, ph, pw;  // window, strides, padding
};

// The part of a window inside of the image along one axis: [first, last). Never empty, since
// padding is at most half of the window.
struct Span {
  int first, last;
  __device__ Span(int out, int stride, int padding, int window, int extent) {
    const int begin = out * stride - padding;
    first = max(begin, 0);
    last = min(begin + window, extent);
  }
};

// One thread per output; neighbours along a row, so a warp reads and writes rows.
extern "C" __global__ void __launch_bounds__(256)
maxpool2d_nchw(const STORAGE* __restrict__ x, STORAGE* __restrict__ out, const PoolShape p) {
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned row = index / p.ow;
  const unsigned plane = row / p.oh;
  if (plane >= (unsigned)p.n * p.c) return;
  const Span rows(row % p.oh, p.sh, p.ph, p.kh, p.h);
  const Span columns(index % p.ow, p.sw, p.pw, p.kw, p.w);

  const STORAGE* image = x + plane * p.h * p.w;
  float best = minus_infinity();
  for (int y = rows.first; y < rows.last; ++y) {
    for (int z = columns.first; z < columns.last; ++z) {
      best = max_nan(best, to_float(image[y * p.w + z]));
    }
  }
  out[index] = from_float<STORAGE>(best);
}

// A thread computes W adjacent channels of one output pixel; its neighbour the next W.
template <int W>
__device__ __forceinline__ void pool_channels(const STORAGE* x, STORAGE* out, const PoolShape& p) {
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned groups = p.c / W;
  const unsigned pixel = index / groups;
  const unsigned row = pixel / p.ow;
  const unsigned n = row / p.oh;
  if (n >= p.n) return;
  const Span rows(row % p.oh, p.sh, p.ph, p.kh, p.h);
  const Span columns(pixel % p.ow, p.sw, p.pw, p.kw, p.w);

  const unsigned corner = (n * p.h + rows.first) * p.w + columns.first;
  const STORAGE* line = x + corner * p.c + index % groups * W;
  float best[W];
#pragma unroll
  for (int i = 0; i < W; ++i) best[i] = minus_infinity();
  for (int y = rows.first; y < rows.last; ++y, line += p.w * p.c) {
    const STORAGE* at = line;
    for (int z = columns.first; z < columns.last; ++z, at += p.c) {
      float value[W];
      load(value, at);
#pragma unroll
      for (int i = 0; i < W; ++i) best[i] = max_nan(best[i], value[i]);
    }
  }
  store(out + index * W, best);
}

// NOTE: without the second launch bound, ptxas aims at 32 registers on some architectures and
// spills.
extern "C" __global__ void __launch_bounds__(256, 4)
maxpool2d_nhwc(const STORAGE* __restrict__ x, STORAGE* __restrict__ out, const PoolShape p) {
  constexpr int W = WIDTH<STORAGE>;
  // Pixels are aligned only if their channels are whole vectors. The host launches one thread per
  // vector, or per channel, accordingly.
  if (p.c % W == 0) {
    pool_channels<W>(x, out, p);
  } else {
    pool_channels<1>(x, out, p);
  }
}
