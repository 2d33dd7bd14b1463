// Max-pooling of bytes: padding never wins.
// 1. NCHW: one thread per output. NHWC: one thread per 16 channels of an output pixel, whose bytes
//    are compared four at a time.
// 2. A thread clips its window to the image and takes the maximum of the rest.
//
// `Order` says how bytes compare:
// - LEAST: a word of four bytes that never win.
// - keys_of(word): four bytes as they are compared. bytes_of(keys): the other way.
// - larger(keys, keys): of each pair.
// - key_of(byte), byte_of(key), of one byte, as int. No key is less than -128.
//
// Constraints: padding is at most half of the window. NHWC with channels that are not whole
// vectors: one thread per channel.
#pragma once
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

// One thread per output; neighbours along a row, so a warp reads and writes rows.
template <typename Order, typename T>
__device__ __forceinline__ void pool_nchw(const T* x, T* out, const PoolShape& p) {
  wait_for_previous_launch();
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned row = index / p.ow;
  const unsigned plane = row / p.oh;
  if (plane >= (unsigned)p.n * p.c) return;
  const Span rows(row % p.oh, p.sh, p.ph, p.kh, p.h);
  const Span columns(index % p.ow, p.sw, p.pw, p.kw, p.w);

  const T* image = x + plane * p.h * p.w;
  int best = -128;
  for (int y = rows.first; y < rows.last; ++y) {
    for (int z = columns.first; z < columns.last; ++z) {
      best = max(best, Order::key_of(image[y * p.w + z]));
    }
  }
  out[index] = Order::byte_of(best);
}

// The thread's channels of a window's pixels, which are p.c bytes apart.
struct Window {
  Span rows, columns;
  unsigned first;  // byte of x
};

template <typename Order, typename T>
__device__ __forceinline__ uint4 best_of_vectors(const T* x, const PoolShape& p,
                                                 const Window& window) {
  uint4 best = make_uint4(Order::LEAST, Order::LEAST, Order::LEAST, Order::LEAST);
  const T* line = x + window.first;
  for (int y = window.rows.first; y < window.rows.last; ++y, line += p.w * p.c) {
    const T* at = line;
    for (int z = window.columns.first; z < window.columns.last; ++z, at += p.c) {
      const uint4 value = *reinterpret_cast<const uint4*>(at);
      best.x = Order::larger(best.x, Order::keys_of(value.x));
      best.y = Order::larger(best.y, Order::keys_of(value.y));
      best.z = Order::larger(best.z, Order::keys_of(value.z));
      best.w = Order::larger(best.w, Order::keys_of(value.w));
    }
  }
  return make_uint4(Order::bytes_of(best.x), Order::bytes_of(best.y), Order::bytes_of(best.z),
                    Order::bytes_of(best.w));
}

template <typename Order, typename T>
__device__ __forceinline__ int best_of_bytes(const T* x, const PoolShape& p,
                                             const Window& window) {
  int best = -128;
  const T* line = x + window.first;
  for (int y = window.rows.first; y < window.rows.last; ++y, line += p.w * p.c) {
    const T* at = line;
    for (int z = window.columns.first; z < window.columns.last; ++z, at += p.c) {
      best = max(best, Order::key_of(*at));
    }
  }
  return Order::byte_of(best);
}

// The host launches a thread per `width` channels: 16, or 1 where pixels are not whole vectors and
// so are not aligned.
template <typename Order, typename T>
__device__ __forceinline__ void pool_nhwc(const T* x, T* out, const PoolShape& p,
                                          unsigned width) {
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
    const uint4 best = best_of_vectors<Order>(x, p, window);
    *reinterpret_cast<uint4*>(out + (size_t)index * width) = best;
  } else {
    out[index] = best_of_bytes<Order>(x, p, window);
  }
}
