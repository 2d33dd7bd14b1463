// Max-pooling of e4m3 numbers, in either layout: a window that holds a NaN gives NaN. See
// bytes/maxpool2d.cuh.
#include "bytes/maxpool2d.cuh"

constexpr unsigned SIGNS = 0x80808080u, MAGNITUDES = 0x7F7F7F7Fu;

// 0xFF in every byte whose sign is set.
__device__ __forceinline__ unsigned signs_of(unsigned bytes) {
  return __vcmpgtu4(bytes, MAGNITUDES);
}

// Keys are bytes whose unsigned order is that of the numbers. NaN has the largest.
struct OfNumbers {
  static constexpr unsigned LEAST = 0;  // the key of no number

  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __vmaxu4(a, b);
  }

  // A NaN loses its sign first.
  static __device__ __forceinline__ unsigned keys_of(unsigned bytes) {
    bytes &= ~(__vcmpeq4(bytes & MAGNITUDES, MAGNITUDES) & SIGNS);
    return bytes ^ (signs_of(bytes) | SIGNS);
  }

  static __device__ __forceinline__ unsigned bytes_of(unsigned keys) {
    return keys ^ (~signs_of(keys) | SIGNS);
  }

  static __device__ __forceinline__ int key_of(unsigned char byte) { return keys_of(byte) & 255; }
  static __device__ __forceinline__ unsigned char byte_of(int key) { return bytes_of(key); }
};

extern "C" __global__ void __launch_bounds__(256)
smaxpool2d_nchw(const unsigned char* __restrict__ x, unsigned char* __restrict__ out,
                const PoolShape p) {
  pool_nchw<OfNumbers>(x, out, p);
}

extern "C" __global__ void __launch_bounds__(256)
smaxpool2d_nhwc(const unsigned char* __restrict__ x, unsigned char* __restrict__ out,
                const PoolShape p, const unsigned width) {
  pool_nhwc<OfNumbers>(x, out, p, width);
}
