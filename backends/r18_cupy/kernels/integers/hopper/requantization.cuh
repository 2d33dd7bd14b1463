// Integer `wgmma` convolutions: products in int32, and requantisation. Sums are exact, so their
// order does not matter. Code shared with e4m3 is in bytes/hopper.
//
// The including file defines X_SIGNED and TILE_* and includes this once.
#pragma once
#include "bytes/hopper/tile.cuh"
#include "integers/requantize.cuh"

#if X_SIGNED
using X = signed char;
#else
using X = unsigned char;
#endif
using Sums = int[GROUP_N / 2];

__device__ __forceinline__ void multiply(Sums& sums, unsigned long long a, unsigned long long b,
                                         bool first) {
  multiply_bytes<X>(sums, a, b, first);
}

// -- epilogue -------------------------------------------------------------------------------------

// In memory. `residual_multiplier` is null without a residual.
struct Factors {
  const int* bias;
  const float* multiplier;
  const float* residual_multiplier;
  int residual_signed;
};

// The epilogue's operands for the sums of a thread's two channels.
struct Finishing {
  int2 bias;
  float2 multiplier;
  float residual_multiplier;
  bool has_residual, residual_signed, relu;

  __device__ __forceinline__ Finishing(const ConvShape& p, const Factors& factors, int channel0)
      : bias{},
        multiplier{},
        residual_multiplier(factors.residual_multiplier ? *factors.residual_multiplier : 0.0f),
        has_residual(factors.residual_multiplier != nullptr),
        residual_signed(factors.residual_signed != 0),
        relu(p.relu != 0) {
    const int channel = channel_of(channel0);
    if (channel < p.o) {
      bias = *reinterpret_cast<const int2*>(factors.bias + channel);
      multiplier = *reinterpret_cast<const float2*>(factors.multiplier + channel);
    }
  }
};

// Two integers saturated to bytes (uint8 with RELU, int8 without), the first lowest; the bytes of
// `upper` follow them.
template <bool RELU>
__device__ __forceinline__ unsigned pack_bytes(int first, int second, unsigned upper) {
  unsigned packed;
  if constexpr (RELU) {
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(second), "r"(first),
        "r"(upper));
  } else {
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(second), "r"(first),
        "r"(upper));
  }
  return packed;
}

enum class Residual { NONE, UNSIGNED, SIGNED };

// `Finishing` of a launch whose residual and ReLU are known.
template <Residual RESIDUAL, bool RELU>
struct FinishingAs {
  static constexpr bool has_residual = RESIDUAL != Residual::NONE;
  const Finishing& by;

  __device__ __forceinline__ unsigned operator()(const int* sums, unsigned residual) const {
    int made[2][2];  // [pixel][channel]
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int channel = v / 2, pixel = v % 2, shift = 16 * pixel + 8 * channel;
      const int sum = sums[v] + (channel ? by.bias.y : by.bias.x);
      float number = scaled(sum, channel ? by.multiplier.y : by.multiplier.x);
      if constexpr (RESIDUAL == Residual::UNSIGNED) {
        number = plus_residual(number, residual >> shift & 255, by.residual_multiplier);
      } else if constexpr (RESIDUAL == Residual::SIGNED) {
        number = plus_residual(number, (signed char)(residual >> shift), by.residual_multiplier);
      }
      made[pixel][channel] = __float2int_rn(number);
    }
    const unsigned upper = pack_bytes<RELU>(made[1][0], made[1][1], 0);
    return pack_bytes<RELU>(made[0][0], made[0][1], upper);
  }
};

template <bool RELU, typename RowOf>
__device__ __forceinline__ void finish_with(const Sums& sums, unsigned slab, const Finishing& by,
                                            const RowOf& row_of) {
  if (!by.has_residual) {
    finish_slab(sums, slab, FinishingAs<Residual::NONE, RELU>{by}, row_of);
  } else if (by.residual_signed) {
    finish_slab(sums, slab, FinishingAs<Residual::SIGNED, RELU>{by}, row_of);
  } else {
    finish_slab(sums, slab, FinishingAs<Residual::UNSIGNED, RELU>{by}, row_of);
  }
}

template <typename RowOf>
__device__ __forceinline__ void finish(const Sums& sums, unsigned slab, const Finishing& by,
                                       const RowOf& row_of) {
  if (by.relu) {
    finish_with<true>(sums, slab, by, row_of);
  } else {
    finish_with<false>(sums, slab, by, row_of);
  }
}

template <bool RELU>
__device__ __forceinline__ unsigned finish_four_with(const int (&sums)[4], unsigned residual,
                                                     const Finishing& by) {
  if (!by.has_residual) return FinishingAs<Residual::NONE, RELU>{by}(sums, residual);
  if (by.residual_signed) return FinishingAs<Residual::SIGNED, RELU>{by}(sums, residual);
  return FinishingAs<Residual::UNSIGNED, RELU>{by}(sums, residual);
}

__device__ __forceinline__ unsigned finish_four(const int (&sums)[4], unsigned residual,
                                                const Finishing& by) {
  return by.relu ? finish_four_with<true>(sums, residual, by)
                 : finish_four_with<false>(sums, residual, by);
}
