// Global average pooling and the linear layer of its means, in one launch: for small batches, where
// each of two launches would wait for the one before it.
// 1. A CTA takes one image and TILE_N output features. Before the previous launch has ended, each
//    warp has the first weights of its features in registers.
// 2. The CTA adds up the pixels of its image, in float32. With TILE_CLUSTER > 1 the CTAs of a
//    cluster divide the channels, and read each other's means from shared memory.
// 3. NHWC: a thread adds one vector of channels over every n-th pixel; the CTA's pixel groups
//    then meet in shared memory. NCHW: eight lanes of a warp add the pixels of a plane.
// 4. A warp computes the products of the means, which are not rounded to storage, and its features'
//    weights. A butterfly adds the lanes; bias is added, and the output is rounded once.
//
// The order of every sum depends only on the extents of one image and on the cluster, so that a
// sample's bits are the same in any batch.
//
// Constraints: channels are whole vectors of 16 bytes, at most MOST_CHANNELS. 512 threads per CTA.
#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#if TILE_CLUSTER > 1
#include "hopper/cluster.cuh"
#define IN_CLUSTER __cluster_dims__(TILE_CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif
#include "ops/linear.cuh"

constexpr int LANES = 32;
constexpr int WARPS = 16;
constexpr int THREADS = LANES * WARPS;
constexpr int W = WIDTH<STORAGE>;  // channels of an access
constexpr int IN_FLIGHT = 7;       // accesses of a thread at a time: all of 7×7 by 8 groups
constexpr int PER_WARP = TILE_N / WARPS;
constexpr int MOST_CHANNELS = 4096;
constexpr int AHEAD = 512 / (LANES * W);  // vectors of a feature that a lane loads in advance
constexpr int PLANE_LANES = 8;
static_assert(TILE_N % WARPS == 0 && PER_WARP <= LANES, "a lane stores one of its warp's features");
static_assert(TILE_K == W && TILE_M == 1, "a CTA takes one image, a vector of channels at a time");
static_assert(MOST_CHANNELS <= THREADS * W * TILE_CLUSTER, "a thread per vector of a pixel");

using Vector = Run<STORAGE, W>;

// The element of a vector's sums at which its `part`, four of them, begins. Without the exchange
// four of eight adjacent threads would store vectors of eight to the same banks.
__device__ __forceinline__ int place_of(int vector, int part) {
  return W == 8 ? vector * W + (part ^ (vector / 4 % 2)) * 4 : vector * W + part * 4;
}

// The channels that a CTA pools: `vectors` of the image's from `first` on, of up to `share`.
struct Share {
  int first, vectors, share;
};

// NHWC. The means of a CTA's channels; partial: of the pixel groups.
__device__ __forceinline__ void pool_nhwc(const STORAGE* image, const Share& own, int channels,
                                          int pixels, float* partial, float* means) {
  const int groups = THREADS / own.share;  // threads beyond them have nothing to add
  const int group = threadIdx.x / own.share, vector = threadIdx.x % own.share;
  if (group < groups && vector < own.vectors) {
    const STORAGE* column = image + (own.first + vector) * W;
    float sum[W] = {};
    for (int first = group; first < pixels; first += groups * IN_FLIGHT) {
      Vector some[IN_FLIGHT] = {};
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int pixel = first + i * groups;
        if (pixel < pixels) {
          some[i] = *reinterpret_cast<const Vector*>(column + (size_t)pixel * channels);
        }
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
#pragma unroll
        for (int v = 0; v < W; ++v) sum[v] += to_float(some[i].at[v]);
      }
    }
    float* row = partial + group * own.share * W;
#pragma unroll
    for (int part = 0; part < W / 4; ++part) {
      *reinterpret_cast<float4*>(row + place_of(vector, part)) =
          make_float4(sum[part * 4], sum[part * 4 + 1], sum[part * 4 + 2], sum[part * 4 + 3]);
    }
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < own.vectors * W; channel += THREADS) {
    const int place = place_of(channel / W, channel % W / 4) + channel % 4;
    float total = 0.0f;
    for (int other = 0; other < groups; ++other) total += partial[other * own.share * W + place];
    means[channel] = total / pixels;
  }
}

// NCHW. The means of a CTA's channels, four planes of a warp at a time.
__device__ __forceinline__ void pool_nchw(const STORAGE* image, const Share& own, int pixels,
                                          float* means) {
  const int planes = own.vectors * W, at_once = WARPS * LANES / PLANE_LANES;
  const int lane = threadIdx.x % PLANE_LANES;
  const STORAGE* first_plane = image + (size_t)own.first * W * pixels;
#pragma unroll 2
  for (int base = 0; base < planes; base += at_once) {  // every lane, as the butterfly needs
    const int plane = base + threadIdx.x / PLANE_LANES;
    const STORAGE* from = first_plane + (size_t)min(plane, planes - 1) * pixels;
    float sum = 0.0f;
    for (int first = lane; first < pixels; first += PLANE_LANES * IN_FLIGHT) {
      float some[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int pixel = first + i * PLANE_LANES;
        some[i] = pixel < pixels ? to_float(from[pixel]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) sum += some[i];
    }
    sum = reduce_lanes<PLANE_LANES>(sum, Sum());
    if (lane == 0 && plane < planes) means[plane] = sum / pixels;
  }
}

// The means of one vector of the image's channels, of whichever CTA of the cluster has them.
__device__ __forceinline__ void means_of(const float* means, int vector, int share,
                                         float (&value)[W]) {
#if TILE_CLUSTER > 1
  const unsigned own = (unsigned)__cvta_generic_to_shared(means + vector % share * W);
  const unsigned place = cluster_address(own, vector / share);
#else
  const float4* place = reinterpret_cast<const float4*>(means + vector * W);
#endif
#pragma unroll
  for (int part = 0; part < W / 4; ++part) {
#if TILE_CLUSTER > 1
    const float4 some = cluster_load(place + part * sizeof(float4));
#else
    const float4 some = place[part];
#endif
    value[part * 4] = some.x, value[part * 4 + 1] = some.y;
    value[part * 4 + 2] = some.z, value[part * 4 + 3] = some.w;
  }
}

__device__ __forceinline__ float dot(const float (&value)[W], const Vector& w, float sum) {
#pragma unroll
  for (int v = 0; v < W; ++v) sum = fmaf(to_float(w.at[v]), value[v], sum);
  return sum;
}

// A feature's weights. Features beyond the last repeat it; their outputs are not written.
__device__ __forceinline__ const Vector* row_of(const STORAGE* weight, int feature,
                                                const LinearShape& p) {
  const size_t row = min(feature, p.out_features - 1);
  return reinterpret_cast<const Vector*>(weight + row * p.features);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) IN_CLUSTER
gap_linear(const STORAGE* __restrict__ x, const STORAGE* __restrict__ weight,
           const float* __restrict__ bias, STORAGE* __restrict__ out, const LinearShape p,
           const int pixels) {
  __shared__ float4 means[MOST_CHANNELS / TILE_CLUSTER / 4];
  const int channels = p.features, vectors = channels / W;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int first = blockIdx.x * TILE_N + warp * PER_WARP;

  Vector w[PER_WARP][AHEAD] = {};
#pragma unroll
  for (int f = 0; f < PER_WARP; ++f) {
    const Vector* row = row_of(weight, first + f, p);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (lane + i * LANES < vectors) w[f][i] = row[lane + i * LANES];
    }
  }
  const float own_bias = bias[min(first + lane % PER_WARP, p.out_features - 1)];
  const int share = (vectors + TILE_CLUSTER - 1) / TILE_CLUSTER;
  const int start = (int)blockIdx.x % TILE_CLUSTER * share;
  const Share own = {start, max(0, min(share, vectors - start)), share};
  const STORAGE* image = x + (size_t)blockIdx.y * pixels * channels;
  float* own_means = reinterpret_cast<float*>(means);
  wait_for_previous_launch();

#if NHWC
  __shared__ float4 partial[THREADS * W / 4];
  pool_nhwc(image, own, channels, pixels, reinterpret_cast<float*>(partial), own_means);
#else
  pool_nchw(image, own, pixels, own_means);
#endif
#if TILE_CLUSTER > 1
  __syncwarp();
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif

  float sum[PER_WARP] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    if (lane + i * LANES >= vectors) break;
    float value[W];
    means_of(own_means, lane + i * LANES, share, value);
#pragma unroll
    for (int f = 0; f < PER_WARP; ++f) sum[f] = dot(value, w[f][i], sum[f]);
  }
  for (int k = lane + AHEAD * LANES; k < vectors; k += LANES) {
    float value[W];
    means_of(own_means, k, share, value);
#pragma unroll
    for (int f = 0; f < PER_WARP; ++f) sum[f] = dot(value, row_of(weight, first + f, p)[k], sum[f]);
  }
  float mine = 0.0f;  // lane f keeps the sum of feature f, so that a warp's outputs are one access
#pragma unroll
  for (int f = 0; f < PER_WARP; ++f) {
    const float total = reduce_lanes<LANES>(sum[f], Sum());
    if (lane == f) mine = total;
  }
#if TILE_CLUSTER > 1
  // No CTA may exit while others read its means. The arrival need not order memory: every value
  // that was loaded has been used above.
  __syncwarp();
  cluster_arrive_relaxed();
#endif
  if (lane < PER_WARP && first + lane < p.out_features) {
    out[(size_t)blockIdx.y * p.out_features + first + lane] = from_float<STORAGE>(mine + own_bias);
  }
#if TILE_CLUSTER > 1
  __syncwarp();
  cluster_wait();
#endif
}
