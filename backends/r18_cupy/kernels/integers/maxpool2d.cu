// Max-pooling of bytes: padding never wins.
// 1. NCHW: one thread per output. NHWC: one thread per 16 channels of an output pixel, whose bytes
//    are compared four at a time.
// 2. A thread clips its window to the image and takes the maximum of the rest.
//
// Constraints: padding is at most half of the window. NHWC with channels that are not whole
// vectors: one thread per channel.
#include "common/dependent_launch.cuh"

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

template <typename T>
struct Bytes;

template <>
struct Bytes<unsigned char> {
  static constexpr unsigned LEAST = 0;  // four bytes that never win
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __vmaxu4(a, b);
  }
};

template <>
struct Bytes<signed char> {
  static constexpr unsigned LEAST = 0x80808080u;
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __vmaxs4(a, b);
  }
};

// One thread per output; neighbours along a row, so a warp reads and writes rows.
extern "C" __global__ void __launch_bounds__(256)
qmaxpool2d_nchw(const BYTE* __restrict__ x, BYTE* __restrict__ out, const PoolShape p) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned row = index / p.ow;
  const unsigned plane = row / p.oh;
  if (plane >= (unsigned)p.n * p.c) return;
  const Span rows(row % p.oh, p.sh, p.ph, p.kh, p.h);
  const Span columns(index % p.ow, p.sw, p.pw, p.kw, p.w);

  const BYTE* image = x + plane * p.h * p.w;
  int best = -128;  // no byte is less
  for (int y = rows.first; y < rows.last; ++y) {
    for (int z = columns.first; z < columns.last; ++z) best = max(best, (int)image[y * p.w + z]);
  }
  out[index] = best;
}

// Of a window's pixels, the thread's channels: pixels are p.c bytes apart.
struct Window {
  Span rows, columns;
  unsigned first;  // byte of x
};

__device__ __forceinline__ uint4 best_of_vectors(const BYTE* x, const PoolShape& p,
                                                 const Window& window) {
  constexpr unsigned LEAST = Bytes<BYTE>::LEAST;
  uint4 best = make_uint4(LEAST, LEAST, LEAST, LEAST);
  const BYTE* line = x + window.first;
  for (int y = window.rows.first; y < window.rows.last; ++y, line += p.w * p.c) {
    const BYTE* at = line;
    for (int z = window.columns.first; z < window.columns.last; ++z, at += p.c) {
      const uint4 value = *reinterpret_cast<const uint4*>(at);
      best.x = Bytes<BYTE>::larger(best.x, value.x);
      best.y = Bytes<BYTE>::larger(best.y, value.y);
      best.z = Bytes<BYTE>::larger(best.z, value.z);
      best.w = Bytes<BYTE>::larger(best.w, value.w);
    }
  }
  return best;
}

__device__ __forceinline__ int best_of_bytes(const BYTE* x, const PoolShape& p,
                                             const Window& window) {
  int best = -128;
  const BYTE* line = x + window.first;
  for (int y = window.rows.first; y < window.rows.last; ++y, line += p.w * p.c) {
    const BYTE* at = line;
    for (int z = window.columns.first; z < window.columns.last; ++z, at += p.c) {
      best = max(best, (int)*at);
    }
  }
  return best;
}

// The host launches a thread per `width` channels: 16, or 1 where pixels are not whole vectors and
// so are not aligned.
extern "C" __global__ void __launch_bounds__(256)
qmaxpool2d_nhwc(const BYTE* __restrict__ x, BYTE* __restrict__ out, const PoolShape p,
                const unsigned width) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned groups = p.c / width;
  const unsigned pixel = index / groups;
  const unsigned row = pixel / p.ow;
  const unsigned n = row / p.oh;
  if (n >= p.n) return;
  const Span rows(row % p.oh, p.sh, p.ph, p.kh, p.h);
  const Span columns(pixel % p.ow, p.sw, p.pw, p.kw, p.w);
  const unsigned corner = (n * p.h + rows.first) * p.w + columns.first;
  const Window window{rows, columns, corner * p.c + index % groups * width};
  if (width > 1) {
    *reinterpret_cast<uint4*>(out + (size_t)index * width) = best_of_vectors(x, p, window);
  } else {
    out[index] = best_of_bytes(x, p, window);
  }
}
