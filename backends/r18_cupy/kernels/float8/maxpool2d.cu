// Max-pooling of e4m3 numbers: padding never wins, and a window that holds a NaN gives NaN.
// 1. NCHW: one thread per output. NHWC: one thread per 16 channels of an output pixel, whose numbers
//    are compared four at a time.
// 2. A thread clips its window to the image and takes the maximum of the rest, of keys: bytes whose
//    unsigned order is that of the numbers. NaN has the largest key.
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

constexpr unsigned SIGNS = 0x80808080u, MAGNITUDES = 0x7F7F7F7Fu;

// 0xFF in every byte whose sign is set.
__device__ __forceinline__ unsigned signs_of(unsigned bytes) {
  return __vcmpgtu4(bytes, MAGNITUDES);
}

// Four numbers as keys, and back. A NaN loses its sign first. 0 is the key of no number.
__device__ __forceinline__ unsigned keys_of(unsigned bytes) {
  bytes &= ~(__vcmpeq4(bytes & MAGNITUDES, MAGNITUDES) & SIGNS);
  return bytes ^ (signs_of(bytes) | SIGNS);
}

__device__ __forceinline__ unsigned numbers_of(unsigned keys) {
  return keys ^ (~signs_of(keys) | SIGNS);
}

// One thread per output; neighbours along a row, so a warp reads and writes rows.
extern "C" __global__ void __launch_bounds__(256)
smaxpool2d_nchw(const unsigned char* __restrict__ x, unsigned char* __restrict__ out,
                const PoolShape p) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned row = index / p.ow;
  const unsigned plane = row / p.oh;
  if (plane >= (unsigned)p.n * p.c) return;
  const Span rows(row % p.oh, p.sh, p.ph, p.kh, p.h);
  const Span columns(index % p.ow, p.sw, p.pw, p.kw, p.w);

  const unsigned char* image = x + plane * p.h * p.w;
  unsigned best = 0;
  for (int y = rows.first; y < rows.last; ++y) {
    for (int z = columns.first; z < columns.last; ++z) {
      best = max(best, keys_of(image[y * p.w + z]) & 255);
    }
  }
  out[index] = numbers_of(best);
}

// Of a window's pixels, the thread's channels: pixels are p.c bytes apart.
struct Window {
  Span rows, columns;
  unsigned first;  // byte of x
};

__device__ __forceinline__ uint4 best_of_vectors(const unsigned char* x, const PoolShape& p,
                                                 const Window& window) {
  uint4 best{};
  const unsigned char* line = x + window.first;
  for (int y = window.rows.first; y < window.rows.last; ++y, line += p.w * p.c) {
    const unsigned char* at = line;
    for (int z = window.columns.first; z < window.columns.last; ++z, at += p.c) {
      const uint4 value = *reinterpret_cast<const uint4*>(at);
      best.x = __vmaxu4(best.x, keys_of(value.x));
      best.y = __vmaxu4(best.y, keys_of(value.y));
      best.z = __vmaxu4(best.z, keys_of(value.z));
      best.w = __vmaxu4(best.w, keys_of(value.w));
    }
  }
  return make_uint4(numbers_of(best.x), numbers_of(best.y), numbers_of(best.z),
                    numbers_of(best.w));
}

__device__ __forceinline__ unsigned best_of_bytes(const unsigned char* x, const PoolShape& p,
                                                  const Window& window) {
  unsigned best = 0;
  const unsigned char* line = x + window.first;
  for (int y = window.rows.first; y < window.rows.last; ++y, line += p.w * p.c) {
    const unsigned char* at = line;
    for (int z = window.columns.first; z < window.columns.last; ++z, at += p.c) {
      best = max(best, keys_of(*at) & 255);
    }
  }
  return numbers_of(best);
}

// The host launches a thread per `width` channels: 16, or 1 where pixels are not whole vectors and
// so are not aligned.
extern "C" __global__ void __launch_bounds__(256)
smaxpool2d_nhwc(const unsigned char* __restrict__ x, unsigned char* __restrict__ out,
                const PoolShape p, const unsigned width) {
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
