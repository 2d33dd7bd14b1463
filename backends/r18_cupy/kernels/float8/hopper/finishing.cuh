// e4m3 `wgmma` convolutions: products, promoted sums, and the epilogue. Code shared with integers
// is in bytes/hopper.
//
// Tensor cores add products of e4m3 at 13 bits of fraction and cut off. A long sum is therefore
// promoted: it begins at zero every PROMOTED products, and is added to float32 registers, rounded
// to nearest.
//
// The including file defines TILE_* and includes this once.
#pragma once
#include "bytes/hopper/tile.cuh"
#include "float8/e4m3.cuh"

constexpr int PROMOTED = 640;           // products of a sum until it is promoted
constexpr int RUN = PROMOTED / TILE_K;  // K tiles likewise

static_assert(PROMOTED % TILE_K == 0, "a sum is promoted behind a K tile");

using Sums = float[GROUP_N / 2];

__device__ __forceinline__ void multiply(Sums& sums, unsigned long long a, unsigned long long b,
                                         bool first) {
  multiply_bytes<E4m3>(sums, a, b, first);
}

// Adds a sum that the unit has completed to one in float32.
__device__ __forceinline__ void promote(Sums& sums, Sums& part) {
  fence_registers(part);
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) sums[i] += part[i];
}

// -- epilogue -------------------------------------------------------------------------------------

// In memory. `residual_multiplier` is null without a residual.
struct Factors {
  const float* bias;
  const float* multiplier;
  const float* residual_multiplier;
};

// The epilogue's operands for the sums of a thread's two channels.
struct Finishing {
  float2 bias, multiplier;
  float residual_multiplier;
  bool has_residual, relu;

  __device__ __forceinline__ Finishing(const ConvShape& p, const Factors& factors, int channel0)
      : bias{},
        multiplier{},
        residual_multiplier(factors.residual_multiplier ? *factors.residual_multiplier : 0.0f),
        has_residual(factors.residual_multiplier != nullptr),
        relu(p.relu != 0) {
    const int channel = channel_of(channel0);
    if (channel < p.o) {
      bias = *reinterpret_cast<const float2*>(factors.bias + channel);
      multiplier = *reinterpret_cast<const float2*>(factors.multiplier + channel);
    }
  }

  // Two channels of a pixel, with the residual's in `bytes`, as two bytes.
  __device__ __forceinline__ unsigned pair(float first, float second, unsigned short bytes) const {
    const float2 added = has_residual ? from_e4m3_pair(bytes) : float2{};
    return to_e4m3_pair(
        finished(first, multiplier.x, bias.x, added.x, residual_multiplier, relu),
        finished(second, multiplier.y, bias.y, added.y, residual_multiplier, relu));
  }

  __device__ __forceinline__ unsigned operator()(const float* sums, unsigned residual) const {
    const unsigned lower = pair(sums[0], sums[2], residual);
    return lower | pair(sums[1], sums[3], residual >> 16) << 16;
  }
};

template <typename RowOf>
__device__ __forceinline__ void finish(const Sums& sums, unsigned slab, const Finishing& by,
                                       const RowOf& row_of) {
  finish_slab(sums, slab, by, row_of);
}

__device__ __forceinline__ unsigned finish_four(const float (&sums)[4], unsigned residual,
                                                const Finishing& by) {
  return by(sums, residual);
}
