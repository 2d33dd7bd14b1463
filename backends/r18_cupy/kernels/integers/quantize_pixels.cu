// Pixels to int8, by a table of 256 bytes per channel; pixels are NHWC.
// 1. `quantize_pixels_nhwc`: a thread takes 16 bytes in their order; the table is in shared memory.
// 2. `quantize_pixels_rgb_to_nchw`: a thread takes 16 adjacent pixels of RGB, and writes 16 bytes
//    of each plane.
// 3. `quantize_pixels_any`: any image, in either layout, one thread per element.
//
// Constraints: `quantize_pixels_nhwc` has room for MOST_CHANNELS; `quantize_pixels_rgb_to_nchw`
// needs planes of whole vectors of 16 pixels.
#include "common/dependent_launch.cuh"
#include "common/vector.cuh"

constexpr int THREADS = 256;
constexpr int VALUES = 256;  // of a pixel
constexpr int RUN = 16;      // bytes per access
constexpr int CHANNELS = 3;

// The table, (channels, 256), to shared memory, while the previous launch still runs.
__device__ __forceinline__ void load_table(const signed char* table, signed char* shared,
                                           unsigned channels) {
  for (unsigned i = threadIdx.x * RUN; i < channels * VALUES; i += THREADS * RUN) {
    *reinterpret_cast<uint4*>(shared + i) = *reinterpret_cast<const uint4*>(table + i);
  }
  __syncthreads();
}

// channels: at most MOST_CHANNELS.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_pixels_nhwc(const unsigned char* __restrict__ x, const signed char* __restrict__ table,
                     signed char* __restrict__ out, const unsigned count,
                     const unsigned channels) {
  __shared__ __align__(16) signed char shared[MOST_CHANNELS * VALUES];
  load_table(table, shared, channels);
  wait_for_previous_launch();
  const unsigned first = (blockIdx.x * THREADS + threadIdx.x) * RUN;
  if (first >= count) return;
  unsigned row = first % channels * VALUES;  // of the table
  const auto advance = [&] { row = row + VALUES < channels * VALUES ? row + VALUES : 0; };
  if (count - first < RUN) {
    for (unsigned i = first; i < count; ++i, advance()) out[i] = shared[row + x[i]];
    return;
  }
  const auto pixels = *reinterpret_cast<const Run<unsigned char, RUN>*>(x + first);
  Run<signed char, RUN> bytes;
#pragma unroll
  for (int i = 0; i < RUN; ++i, advance()) bytes.at[i] = shared[row + pixels.at[i]];
  *reinterpret_cast<Run<signed char, RUN>*>(out + first) = bytes;
}

// Images of `runs` vectors of 16 pixels; `threads` vectors in all.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_pixels_rgb_to_nchw(const unsigned char* __restrict__ x,
                            const signed char* __restrict__ table, signed char* __restrict__ out,
                            const unsigned threads, const unsigned runs) {
  __shared__ __align__(16) signed char shared[CHANNELS * VALUES];
  load_table(table, shared, CHANNELS);
  wait_for_previous_launch();
  const unsigned run = blockIdx.x * THREADS + threadIdx.x;
  if (run >= threads) return;
  Run<unsigned char, RUN> part[CHANNELS];
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) {
    part[i] = reinterpret_cast<const Run<unsigned char, RUN>*>(x)[run * CHANNELS + i];
  }
  const unsigned image = run / runs;
  const unsigned plane = image * CHANNELS * runs + (run - image * runs);  // in vectors
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    Run<signed char, RUN> bytes;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      const int byte = i * CHANNELS + c;
      bytes.at[i] = shared[c * VALUES + part[byte / RUN].at[byte % RUN]];
    }
    reinterpret_cast<Run<signed char, RUN>*>(out)[plane + c * runs] = bytes;
  }
}

// One thread per element, in output order. run: pixels of a plane in NCHW; 1 in NHWC, where a pixel
// is an image of its own.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_pixels_any(const unsigned char* __restrict__ x, const signed char* __restrict__ table,
                    signed char* __restrict__ out, const unsigned count, const unsigned channels,
                    const unsigned run) {
  wait_for_previous_launch();
  const unsigned at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  const unsigned plane = at / run, image = plane / channels, c = plane - image * channels;
  const unsigned pixel = image * run + (at - plane * run);
  out[at] = table[c * VALUES + x[pixel * channels + c]];
}
