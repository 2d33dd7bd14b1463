// Convolution of e4m3 images with few channels under 7×7 windows, fused with max-pooling, on
// Hopper's tensor cores (wgmma). The image is NCHW, in e4m3 or float32; float32 is rounded to e4m3
// first (stem_image.cuh). Writes NHWC.
//
// bytes/hopper/stem_kernel.cuh has the kernel. The largest sum of a window is scaled, and rounded
// to e4m3. Sums are not promoted: they have 7·7 products for each channel, at 13 bits of fraction.
//
// NaN: 0 times NaN is NaN, and the pixel outside of the window would spoil the sum. So producers
// replace each pixel that has a NaN by zeros, and leave a bit of it behind the lines of the stage.
// Consumers of a marked stage make NaN of the sums whose windows hold such a pixel. Weights are
// finite, or every output of their channel is NaN anyway.
//
// Constraints: sm_90a; windows of 7×7, stride 2, padding 3; at most 4 channels; output channels in
// sixteens; pooling 3×3 with stride 2 and padding 1.
#include "float8/stem_image.cuh"

// For each line a byte per quad, whose bits say which pixels are NaN. The last bytes of the first
// line's are the marks: for each producer warp, whether it has set any bit.
constexpr int LINE_NOTES = 64;
#include "bytes/hopper/stem.cuh"
#include "bytes/hopper/wgmma_registers.cuh"
#include "hopper/tma.cuh"

constexpr int MARKS = NOTES + 60;

static_assert(QUADS + PRODUCERS / 32 <= LINE_NOTES, "marks follow the bytes of a line's quads");

using Number = float;
using Sums = float[COLUMNS / 2];  // of a thread; layout in hopper/wgmma.cuh

__device__ __forceinline__ float least() { return __int_as_float(0xFF800000); }

// NaN if one is.
__device__ __forceinline__ float larger(float a, float b) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
}

// -- NaN ---------------------------------------------------------------------------------------

__device__ __forceinline__ void store_byte(unsigned address, unsigned byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(byte) : "memory");
}

struct Notes {
  int quad, line0, warp, lane;
  unsigned dirty = 0;  // a bit for each slot in which this warp has left bits of NaN

  // index: of the producer thread.
  __device__ __forceinline__ explicit Notes(int index)
      : quad(index % LINE_THREADS),
        line0(index / LINE_THREADS),
        warp(index / 32),
        lane(index % 32) {}

  // Nothing is NaN yet.
  static __device__ __forceinline__ void clear(unsigned lines) {
    for (int i = threadIdx.x; i < STAGES * STAGE_LINES * LINE_NOTES / 4; i += THREADS) {
      constexpr int WORDS = STAGE_LINES * LINE_NOTES / 4;  // of a stage
      const unsigned at = lines + i / WORDS * STAGE_BYTES + NOTES + i % WORDS * 4;
      asm volatile("st.shared.b32 [%0], 0;" ::"r"(at) : "memory");
    }
    // wgmma reads none of them, but orders by proxy are stated for all of shared memory.
    fence_async_proxy();
  }

  // All lanes of the warp.
  __device__ __forceinline__ void take(Quad (&pixels)[OWN_LINES], unsigned stage, int slot) {
    bool nan = false;
#pragma unroll
    for (int i = 0; i < OWN_LINES; ++i) nan = nan || has_nan(pixels[i]);
    const bool marks = __any_sync(0xffffffffu, nan);
    if (!marks && !(dirty >> slot & 1)) return;
    dirty = dirty & ~(1u << slot) | (unsigned)marks << slot;
    if (quad < QUADS) {
#pragma unroll
      for (int i = 0; i < OWN_LINES; ++i) {
        const int line = line0 + i * (STAGE_LINES / OWN_LINES);
        store_byte(stage + NOTES + line * LINE_NOTES + quad, take_nan(pixels[i]));
      }
    }
    if (lane == 0) store_byte(stage + MARKS + warp, marks);
  }

  static __device__ __forceinline__ bool any(unsigned stage) {
    unsigned marks;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(marks) : "r"(stage + MARKS) : "memory");
    return marks != 0;
  }
};

__device__ __forceinline__ unsigned load_pair(unsigned address) {
  unsigned short found;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(address) : "memory");
  return found;
}

// Makes NaN of the sums of windows that hold a NaN. Column 2e reads of quad e all pixels but the
// first, and quad e + 1; column 2e + 1 of quad e the last, e + 1, and of e + 2 the first two.
__device__ __forceinline__ void spread_nans(Sums& sums, const Line (&lines)[WINDOW]) {
  const int lane = threadIdx.x % 32;
  unsigned pair = 0;  // of quads 2·lane and the next, a byte each
#pragma unroll
  for (int r = 0; r < WINDOW; ++r) {
    pair |= load_pair(lines[r].stage * 16 + NOTES + lines[r].number * LINE_NOTES + 2 * lane);
  }
  const float nan = __int_as_float(0x7FFFFFFF);
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    const int from = 4 * j + lane % 4;
    const unsigned low = __shfl_sync(0xffffffffu, pair, from);
    const unsigned high = __shfl_sync(0xffffffffu, pair, from + 1);
    const unsigned quads = low & 0xFFFF | high << 16;
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i) {
      const int next = i % 2 * 8;  // bits of a quad
      if (quads & 0x0F0Eu << next) sums[i] = nan;
      if (quads & 0x030F08u << next) sums[i + 4 * GROUPS] = nan;
    }
  }
}

// -- sums --------------------------------------------------------------------------------------

struct Channels {
  float bias[2], multiplier[2];
  bool clamps;

  __device__ __forceinline__ Channels(const ConvShape& p, const float* biases,
                                      const float* multipliers, int channel)
      : clamps(p.relu) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bias[i] = channel + i < p.o ? biases[channel + i] : 0.0f;
      multiplier[i] = channel + i < p.o ? multipliers[channel + i] : 0.0f;
    }
  }

  __device__ __forceinline__ float number(float sum, int channel) const {
    const float found = fmaf(sum, multiplier[channel], bias[channel]);
    return clamps ? relu(found) : found;
  }

  __device__ __forceinline__ unsigned pack(const float (&sums)[2][2]) const {
    const unsigned one = to_e4m3_pair(number(sums[0][0], 0), number(sums[1][0], 1));
    const unsigned two = to_e4m3_pair(number(sums[0][1], 0), number(sums[1][1], 1));
    return one | two << 16;
  }
};

__device__ __forceinline__ void multiply_lines(Sums& sums, const Weights& weights, const Channels&,
                                               const Line (&lines)[WINDOW], bool noted) {
  fence_registers(sums);
  wgmma_fence();
  registers_wgmma_begin<E4m3, COLUMNS>(sums, weights[0], columns_at(lines[0]));
#pragma unroll
  for (int r = 1; r < WINDOW; ++r) {
    registers_wgmma<E4m3, COLUMNS>(sums, weights[r], columns_at(lines[r]));
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_registers(sums);
  if (noted) spread_nans(sums, lines);
}

#include "bytes/hopper/stem_kernel.cuh"

// `scale`: of float32, else null.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
sconv2d_maxpool2d_few_channels_wgmma(const unsigned char* x, const uint4* __restrict__ weight,
                                     const float* __restrict__ bias,
                                     const float* __restrict__ multiplier,
                                     const float* __restrict__ scale,
                                     unsigned char* __restrict__ out, const ConvShape p,
                                     const Task task) {
  convolve_and_pool(x, weight, bias, multiplier, scale, out, p, task);
}
