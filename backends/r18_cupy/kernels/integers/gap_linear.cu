// Global average pooling of bytes and the linear layer of its means, in one launch: for small
// batches, where each of two launches would wait for the one before it.
// 1. A CTA takes one image and TILE_N output features. Before the previous launch has ended, each
//    warp has the weights of its features in registers.
// 2. The CTA adds up all pixels of its image. A thread adds 16 channels of every n-th pixel,
//    two channels in a word; the CTA's pixel groups then meet in shared memory.
// 3. Sums are scaled, rounded and saturated to bytes: the means, in shared memory.
// 4. A warp computes the products of the means and its features' weights; bias and multiplier make
//    a float32 of each sum.
//
// Every CTA of an image computes the same means, which costs less than a second launch while the
// image is small and comes from the L2.
//
// Constraints: channels are a multiple of 16 and at most MOST_CHANNELS; at most MOST_PIXELS pixels,
// so that no sum leaves 16 bits. 256 threads per CTA.
#include "common/dependent_launch.cuh"
#include "integers/dot.cuh"
#include "integers/requantize.cuh"
#include "ops/linear.cuh"

constexpr int LANES = 32;
constexpr int WARPS = 8;
constexpr int THREADS = LANES * WARPS;
constexpr int CHUNK = 16;          // channels of an access
constexpr int WORDS = CHUNK / 2;   // words of sums per chunk, two channels each
constexpr int IN_FLIGHT = 7;       // accesses of a thread at a time: all of 7×7 by 8 groups
constexpr int PER_WARP = TILE_N / WARPS;
constexpr int MOST_CHANNELS = THREADS * CHUNK;  // a thread per chunk of a pixel
constexpr int MOST_PIXELS = 65535 / 255;
static_assert(MOST_PIXELS * 255 < 1 << 16, "two sums share a word");
static_assert(TILE_N % WARPS == 0 && PER_WARP <= LANES, "a lane stores one of its warp's features");
static_assert(TILE_K == CHUNK && TILE_M == 1, "a CTA takes one image, 16 channels at a time");

constexpr bool SIGNED = static_cast<BYTE>(-1) < static_cast<BYTE>(0);
// Signed bytes are added up as unsigned ones, 128 larger. NOTE: a pixel beyond the image is read as
// this too, so it counts as zero.
constexpr unsigned FLIP = SIGNED ? 0x80808080u : 0u;
constexpr int OFFSET = SIGNED ? 128 : 0;
constexpr int LOW = SIGNED ? -128 : 0, HIGH = LOW + 255;

__device__ __forceinline__ int warp_sum(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, value);
#else
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
#endif
}

// Adds the four bytes of a word to 16-bit sums: bytes 0 and 2 to the first word, 1 and 3 to the
// second.
__device__ __forceinline__ void add_bytes(unsigned bytes, unsigned& even, unsigned& odd) {
  const unsigned flipped = bytes ^ FLIP;
  even += flipped & 0x00ff00ffu;
  odd += __byte_perm(flipped, 0, 0x4341);
}

// The word of a chunk's sums at which its `part`, one of two vectors, begins. Without the exchange
// four of eight adjacent threads would store to the same banks.
__device__ __forceinline__ int place_of(int chunk, int part) {
  return chunk * WORDS + (part ^ (chunk / 4 % 2)) * 4;
}

// One pixel group's sums of a chunk's 16 channels: pixels group, group + groups, …
__device__ __forceinline__ void add_pixels(const BYTE* column, int channels, int pixels, int group,
                                           int groups, unsigned (&sum)[WORDS]) {
  for (int first = group; first < pixels; first += groups * IN_FLIGHT) {
    uint4 some[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int pixel = first + i * groups;
      some[i] = pixel < pixels
                    ? *reinterpret_cast<const uint4*>(column + (size_t)pixel * channels)
                    : make_uint4(FLIP, FLIP, FLIP, FLIP);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      add_bytes(some[i].x, sum[0], sum[1]);
      add_bytes(some[i].y, sum[2], sum[3]);
      add_bytes(some[i].z, sum[4], sum[5]);
      add_bytes(some[i].w, sum[6], sum[7]);
    }
  }
}

// The means of the image's channels, in shared memory. partial: of `groups` pixel groups.
__device__ __forceinline__ void reduce(const unsigned* partial, BYTE* means, int channels,
                                       int groups, int pixels, float factor) {
  const int words = channels / 2;
  for (int word = threadIdx.x; word < words; word += THREADS) {
    const int chunk = word / WORDS, within = word % WORDS;
    const int place = place_of(chunk, within / 4) + within % 4;
    unsigned total = 0;
    for (int group = 0; group < groups; ++group) total += partial[group * words + place];
    const int sums[2] = {(int)(total & 0xffffu), (int)(total >> 16)};
    // A word of bytes has its even ones in one word of sums, its odd ones in the next.
    const int channel = chunk * CHUNK + within / 2 * 4 + within % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      means[channel + 2 * i] = saturated(scaled(sums[i] - OFFSET * pixels, factor), LOW, HIGH);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
qgap_linear(const BYTE* __restrict__ x, const signed char* __restrict__ weight,
            const int* __restrict__ bias, const float* __restrict__ multiplier,
            const float* __restrict__ mean_multiplier, float* __restrict__ out,
            const LinearShape p, const int pixels) {
  alignas(16) __shared__ unsigned partial[THREADS * WORDS];
  __shared__ uint4 means[MOST_CHANNELS / CHUNK];
  const int channels = p.features, chunks = channels / CHUNK;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int first = blockIdx.x * TILE_N + warp * PER_WARP;

  // A lane's first chunk of each feature's weights. Features beyond the last repeat it; their
  // outputs are not written.
  uint4 w[PER_WARP];
#pragma unroll
  for (int f = 0; f < PER_WARP; ++f) {
    const signed char* row = weight + (size_t)min(first + f, p.out_features - 1) * channels;
    w[f] = lane < chunks ? reinterpret_cast<const uint4*>(row)[lane] : make_uint4(0, 0, 0, 0);
  }
  const int own = min(first + lane % PER_WARP, p.out_features - 1);
  const int own_bias = bias[own];
  const float own_factor = multiplier[own], mean_factor = *mean_multiplier;
  const int groups = THREADS / chunks;  // of pixels; the threads beyond them have nothing to add
  const int group = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  wait_for_previous_launch();

  if (group < groups) {
    unsigned sum[WORDS] = {};
    const BYTE* image = x + (size_t)blockIdx.y * pixels * channels;
    add_pixels(image + chunk * CHUNK, channels, pixels, group, groups, sum);
    unsigned* row = partial + group * chunks * WORDS;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      *reinterpret_cast<uint4*>(row + place_of(chunk, part)) =
          make_uint4(sum[part * 4], sum[part * 4 + 1], sum[part * 4 + 2], sum[part * 4 + 3]);
    }
  }
  __syncthreads();
  reduce(partial, reinterpret_cast<BYTE*>(means), channels, groups, pixels, mean_factor);
  __syncthreads();

  int total[PER_WARP] = {};
  if (lane < chunks) {
    const uint4 some = means[lane];
#pragma unroll
    for (int f = 0; f < PER_WARP; ++f) total[f] = dot16<BYTE>(some, w[f], 0);
  }
  for (int k = lane + LANES; k < chunks; k += LANES) {
    const uint4 some = means[k];
#pragma unroll
    for (int f = 0; f < PER_WARP; ++f) {
      const signed char* row = weight + (size_t)min(first + f, p.out_features - 1) * channels;
      total[f] = dot16<BYTE>(some, reinterpret_cast<const uint4*>(row)[k], total[f]);
    }
  }
  int mine = 0;  // lane f keeps the sum of feature f, so that a warp's outputs are one access
#pragma unroll
  for (int f = 0; f < PER_WARP; ++f) {
    const int sum = warp_sum(total[f]);
    if (lane == f) mine = sum;
  }
  if (lane < PER_WARP && first + lane < p.out_features) {
    out[(size_t)blockIdx.y * p.out_features + first + lane] = scaled(mine + own_bias, own_factor);
  }
}
