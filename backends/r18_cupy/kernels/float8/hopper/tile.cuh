// What the e4m3 `wgmma` convolutions have of their own: products and the epilogue. Threads,
// mbarriers and slabs are those of the integers' (integers/hopper/tile.cuh), and so is the order of
// packed weights. NHWC.
//
// Tensor cores add products of e4m3 at 13 bits of fraction and cut off. A long sum is therefore
// promoted: it begins at zero every PROMOTED products, and is added to float32 registers, rounded
// to nearest.
//
// The including file defines TILE_* and includes this once.
#pragma once
#define X_SIGNED 1
#include "float8/hopper/wgmma.cuh"
#include "integers/hopper/tile.cuh"

constexpr int PROMOTED = 640;          // products of a sum until it is promoted
constexpr int RUN = PROMOTED / TILE_K;  // K tiles likewise

static_assert(PROMOTED % TILE_K == 0, "a sum is promoted behind a K tile");

using Numbers = float[GROUP_N / 2];  // of a thread; layout in hopper/wgmma.cuh

// Issues A·Bᵀ over one K tile as `multiply` of integers/hopper/tile.cuh does.
__device__ __forceinline__ void multiply(Numbers& sums, unsigned long long a, unsigned long long b,
                                         bool first) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    wgmma_e4m3<GROUP_N>(sums, a + step * K_STEP, b + step * K_STEP, step > 0 || !first);
  }
}

// Makes the compiler treat registers as read and written here. It does not know that `wgmma` writes
// them asynchronously, and would read them ahead of the wait.
__device__ __forceinline__ void fence_registers(Numbers& of) {
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) asm volatile("" : "+f"(of[i])::"memory");
}

// Adds a sum that the unit has completed to one in float32.
__device__ __forceinline__ void promote(Numbers& sums, Numbers& part) {
  fence_registers(part);
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) sums[i] += part[i];
}

// -- epilogue -------------------------------------------------------------------------------------

// What the sums are finished with.
struct Finishing {
  float2 bias, multiplier;  // of the thread's two channels
  float residual_multiplier;
  bool has_residual, relu;

  __device__ __forceinline__ Finishing(const ConvShape& p, const float* biases,
                                       const float* multipliers, const float* residual_multipliers,
                                       int channel0)
      : bias{},
        multiplier{},
        residual_multiplier(residual_multipliers ? *residual_multipliers : 0.0f),
        has_residual(residual_multipliers != nullptr),
        relu(p.relu != 0) {
    const int channel = channel_of(channel0);
    if (channel < p.o) {
      bias = *reinterpret_cast<const float2*>(biases + channel);
      multiplier = *reinterpret_cast<const float2*>(multipliers + channel);
    }
  }

  // Two channels of a pixel, with the residual's in `bytes`, as two bytes.
  __device__ __forceinline__ unsigned operator()(float first, float second,
                                                 unsigned short bytes) const {
    const float2 added = has_residual ? from_e4m3_pair(bytes) : float2{};
    return to_e4m3_pair(
        finished(first, multiplier.x, bias.x, added.x, residual_multiplier, relu),
        finished(second, multiplier.y, bias.y, added.y, residual_multiplier, relu));
  }
};

// Finishes COUNT matrices of 16 channels by 8 pixels, with the residual at `address` in the slab,
// and writes them there. Lane i has the address of pixel i % 8 of matrix i / 8.
template <int COUNT>
__device__ __forceinline__ void finish_matrices(const float* sums, unsigned address,
                                                const Finishing& by) {
  unsigned bytes[4] = {};  // channels 2i and 2i + 1 of a pixel, then of the next pixel
  if (by.has_residual) {
    if constexpr (COUNT == 4) {
      load_transposed(bytes, address);
    } else {
      load_transposed_pair(bytes, address);
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float* four = sums + 4 * i;  // [channel][pixel]
    const unsigned lower = by(four[0], four[2], bytes[i]);
    bytes[i] = lower | by(four[1], four[3], bytes[i] >> 16) << 16;
  }
  if constexpr (COUNT == 4) {
    store_transposed(address, bytes);
  } else {
    store_transposed_pair(address, bytes);
  }
}

// Finishes a warpgroup's sums into its slab, which holds the residual if there is one.
// `row_of(place)` maps a pixel of the tile to its row in the slab; no two places share one.
template <typename RowOf>
__device__ __forceinline__ void finish(const Numbers& sums, unsigned slab, const Finishing& by,
                                       const RowOf& row_of) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const auto address = [&](int place) {
    const int row = row_of(place);
    return slab + row * SLAB_ROW + (warp ^ row / 2 % 4) * 16;
  };
#pragma unroll
  for (int j = 0; j < GROUP_N / 32; ++j) {
    finish_matrices<4>(sums + 16 * j, address(32 * j + lane), by);
  }
  if constexpr (GROUP_N % 32 != 0) {  // two matrices: the upper lanes' addresses are unused
    constexpr int LAST = GROUP_N / 32;
    finish_matrices<2>(sums + 16 * LAST, address(32 * LAST + lane % 16), by);
  }
}
