// Max-pooling of integers, in either layout. See bytes/maxpool2d.cuh.
#include "bytes/maxpool2d.cuh"

template <typename T>
struct Words;

template <>
struct Words<unsigned char> {
  static constexpr unsigned LEAST = 0;
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __vmaxu4(a, b);
  }
};

template <>
struct Words<signed char> {
  static constexpr unsigned LEAST = 0x80808080u;
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __vmaxs4(a, b);
  }
};

// Integers compare as they are.
struct OfIntegers : Words<BYTE> {
  static __device__ __forceinline__ unsigned keys_of(unsigned bytes) { return bytes; }
  static __device__ __forceinline__ unsigned bytes_of(unsigned keys) { return keys; }
  static __device__ __forceinline__ int key_of(BYTE byte) { return byte; }
  static __device__ __forceinline__ BYTE byte_of(int key) { return key; }
};

extern "C" __global__ void __launch_bounds__(256)
qmaxpool2d_nchw(const BYTE* __restrict__ x, BYTE* __restrict__ out, const PoolShape p) {
  pool_nchw<OfIntegers>(x, out, p);
}

extern "C" __global__ void __launch_bounds__(256)
qmaxpool2d_nhwc(const BYTE* __restrict__ x, BYTE* __restrict__ out, const PoolShape p,
                const unsigned width) {
  pool_nhwc<OfIntegers>(x, out, p, width);
}
