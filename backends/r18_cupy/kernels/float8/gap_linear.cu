// Global average pooling of e4m3 numbers and the linear layer of its means, to float32 logits, in
// one launch: for small batches, where each of two launches would wait for the one before it.
// 1. A CTA takes one image and TILE_N output features. Before the previous launch has ended, each
//    warp has the first weights of its features in registers.
// 2. The CTA adds up all pixels of its image, in float32. A thread adds 16 channels of every n-th
//    pixel; the CTA's pixel groups then meet in shared memory, in order, and are divided.
// 3. A warp computes the products of the means, which stay in float32, and its features' weights. A
//    butterfly adds the lanes; multiplier and bias make a logit of each sum.
//
// Products are added in the order of linear_warp_dot.cu, whatever the batch and TILE_N are. Sums of
// up to 73 e4m3 numbers are exact in float32, as multiples of 2⁻⁹ below 2¹⁵, so that logits of
// 7×7 pixels are those of the two launches to the bit.
//
// Every CTA of an image computes the same means, which costs less than a second launch while the
// image is small and comes from the L2.
//
// Constraints: channels are a multiple of 16 and at most MOST_CHANNELS. 256 threads per CTA.
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "float8/e4m3.cuh"
#include "ops/linear.cuh"

constexpr int LANES = 32;
constexpr int WARPS = 8;
constexpr int THREADS = LANES * WARPS;
constexpr int CHUNK = 16;                    // channels of an access to pixels
constexpr int FOUR = 4;                      // channels of an access to weights and means
constexpr int PARTS = CHUNK / FOUR;          // vectors of a chunk's sums
constexpr int IN_FLIGHT = 7;                 // pixels of a thread at a time: all of 7×7 by 8 groups
constexpr int AHEAD = 512 / (LANES * FOUR);  // words of a feature that a lane loads in advance
constexpr int PER_WARP = TILE_N / WARPS;
constexpr int MOST_CHANNELS = THREADS * CHUNK;  // a thread per chunk of a pixel
static_assert(TILE_N % WARPS == 0 && PER_WARP <= LANES, "a lane stores one of its warp's features");
static_assert(TILE_K == CHUNK && TILE_M == 1, "a CTA takes one image, 16 channels at a time");

// The vector of an image's sums at which a chunk's `part` is stored. Without the exchange four of
// eight adjacent threads, which store chunks, would meet in the same banks.
__device__ __forceinline__ int place_of(int chunk, int part) {
  return chunk * PARTS + (part ^ (chunk / 2 % PARTS));
}

__device__ __forceinline__ void add_word(unsigned word, float* sum) {
  const float2 low = from_e4m3_pair((unsigned short)word);
  const float2 high = from_e4m3_pair((unsigned short)(word >> 16));
  sum[0] += low.x, sum[1] += low.y, sum[2] += high.x, sum[3] += high.y;
}

// One pixel group's sums of a chunk's 16 channels: pixels group, group + groups, …
__device__ __forceinline__ void add_pixels(const unsigned char* column, int channels, int pixels,
                                           int group, int groups, float (&sum)[CHUNK]) {
  for (int first = group; first < pixels; first += groups * IN_FLIGHT) {
    uint4 some[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int pixel = first + i * groups;
      some[i] = pixel < pixels
                    ? *reinterpret_cast<const uint4*>(column + (size_t)pixel * channels)
                    : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      add_word(some[i].x, sum);
      add_word(some[i].y, sum + 4);
      add_word(some[i].z, sum + 8);
      add_word(some[i].w, sum + 12);
    }
  }
}

// A feature's weights. Features beyond the last repeat it; their outputs are not written.
__device__ __forceinline__ const unsigned* row_of(const unsigned char* weight, int feature,
                                                  const LinearShape& p) {
  const size_t row = min(feature, p.out_features - 1);
  return reinterpret_cast<const unsigned*>(weight + row * p.features);
}

__device__ __forceinline__ float dot(const float4& value, unsigned word, float sum) {
  const float2 low = from_e4m3_pair((unsigned short)word);
  const float2 high = from_e4m3_pair((unsigned short)(word >> 16));
  sum = fmaf(low.x, value.x, sum);
  sum = fmaf(low.y, value.y, sum);
  sum = fmaf(high.x, value.z, sum);
  return fmaf(high.y, value.w, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
sgap_linear(const unsigned char* __restrict__ x, const unsigned char* __restrict__ weight,
            const float* __restrict__ bias, const float* __restrict__ multiplier,
            float* __restrict__ out, const LinearShape p, const int pixels) {
  __shared__ float4 partial[MOST_CHANNELS / FOUR];
  __shared__ float4 means[MOST_CHANNELS / FOUR];
  const int channels = p.features, fours = channels / FOUR, chunks = channels / CHUNK;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int first = blockIdx.x * TILE_N + warp * PER_WARP;

  unsigned w[PER_WARP][AHEAD] = {};
#pragma unroll
  for (int f = 0; f < PER_WARP; ++f) {
    const unsigned* row = row_of(weight, first + f, p);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (lane + i * LANES < fours) w[f][i] = row[lane + i * LANES];
    }
  }
  const int own = min(first + lane % PER_WARP, p.out_features - 1);
  const float own_bias = bias[own], own_factor = multiplier[own];
  const int groups = THREADS / chunks;  // of pixels; the threads beyond them have nothing to add
  const int group = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  wait_for_previous_launch();

  if (group < groups) {
    float sum[CHUNK] = {};
    const unsigned char* image = x + (size_t)blockIdx.y * pixels * channels;
    add_pixels(image + chunk * CHUNK, channels, pixels, group, groups, sum);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      partial[group * fours + place_of(chunk, part)] =
          make_float4(sum[part * 4], sum[part * 4 + 1], sum[part * 4 + 2], sum[part * 4 + 3]);
    }
  }
  __syncthreads();
  // A mean is stored where its sums are: no thread need know its channel.
  const float* sums = reinterpret_cast<const float*>(partial);
  for (int place = threadIdx.x; place < channels; place += THREADS) {
    float total = 0.0f;
    for (int other = 0; other < groups; ++other) total += sums[other * channels + place];
    reinterpret_cast<float*>(means)[place] = total / pixels;
  }
  __syncthreads();

  float sum[PER_WARP] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    const int k = lane + i * LANES;
    if (k >= fours) break;
    const float4 value = means[place_of(k / PARTS, k % PARTS)];
#pragma unroll
    for (int f = 0; f < PER_WARP; ++f) sum[f] = dot(value, w[f][i], sum[f]);
  }
  for (int k = lane + AHEAD * LANES; k < fours; k += LANES) {
    const float4 value = means[place_of(k / PARTS, k % PARTS)];
#pragma unroll
    for (int f = 0; f < PER_WARP; ++f) sum[f] = dot(value, row_of(weight, first + f, p)[k], sum[f]);
  }
  float mine = 0.0f;  // lane f keeps the sum of feature f, so that a warp's outputs are one access
#pragma unroll
  for (int f = 0; f < PER_WARP; ++f) {
    const float total = reduce_lanes<LANES>(sum[f], Sum());
    if (lane == f) mine = total;
  }
  if (lane < PER_WARP && first + lane < p.out_features) {
    out[(size_t)blockIdx.y * p.out_features + first + lane] = fmaf(mine, own_factor, own_bias);
  }
}
