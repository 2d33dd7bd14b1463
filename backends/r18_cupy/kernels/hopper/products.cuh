// Products of matrices that both lie in shared memory, and how their sums leave as channels of
// pixels.
//
// Rows of A are output channels, rows of B output pixels: so the sums of a tile of few channels,
// which the first layers are, still come from instructions that read many pixels. The including
// file defines STORAGE and TILE_* and includes this once.
//
// SPLIT: factors of float32 are multiplied as two float16 numbers each, see split.cuh. Weights come
// so packed, 32 high halves and then 32 low ones in 128 bytes; pixels are split where they arrived.
#pragma once
#include "mma/split.cuh"
#include "mma/transposed_matrices.cuh"
#include "hopper/pipeline.cuh"

constexpr int GROUP_N = TILE_N / TILE_GROUPS_N;  // pixels of a warpgroup
constexpr int SLABS_GROUP = 64 / SLAB_CHANNELS;

static_assert(TILE_M == 64 * TILE_GROUPS_M, "a warpgroup multiplies 64 channels");
static_assert(TILE_N % TILE_GROUPS_N == 0 && GROUP_N % 8 == 0, "a matrix begins at 1024 bytes");

using Sums = float[GROUP_N / 2];  // of a thread, see wgmma.cuh

#ifdef SPLIT
constexpr bool SPLITS = true;
using Factor = __half;

static_assert(sizeof(STORAGE) == 4, "a row of 128 bytes is split into as many");
#else
constexpr bool SPLITS = false;
using Factor = STORAGE;
#endif

// What a thread sums products in: those of high halves, and apart those of a high and a low half.
struct Products {
  Sums main = {};
#ifdef SPLIT
  Sums cross = {};
#endif

  // All of it into `main`, once nothing is added any more.
  __device__ __forceinline__ Sums& fold() {
#ifdef SPLIT
#pragma unroll
    for (int i = 0; i < GROUP_N / 2; ++i) main[i] = fmaf(cross[i], 1 / LOW_SCALE, main[i]);
#endif
    return main;
  }
};

// -- products -------------------------------------------------------------------------------------

__device__ __forceinline__ float4 shared_load(unsigned address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void shared_store(unsigned address, unsigned a, unsigned b, unsigned c,
                                             unsigned d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Splits rows of pixels in place: 32 floats of 128 bytes become 32 high halves and 32 low ones,
// their chunks permuted as those of the floats were. A warp has eight rows at each of `rows_at(0)`
// to `rows_at(count - 1)`, multiples of 1024. All multiplying threads meet at `factors_made` after.
//
// Four lanes have a row, each two chunks of floats, which become one of high halves and one of low
// ones. Eight lanes, whose accesses go together, have rows i and i ^ 5: these differ in their parity
// and in bit 2, so that both what is read and what is written lies in all 32 banks.
template <int MOST, typename RowsAt>
__device__ __forceinline__ void split_eights(const RowsAt& rows_at, int count) {
  const int quarter = threadIdx.x % 4, lanes = threadIdx.x % 32 / 4;
  const int row = lanes / 2 ^ (lanes % 2 ? 5 : 0);
  const unsigned read = row * ROW_BYTES + (2 * quarter ^ row) * 16;
  const unsigned written = row * ROW_BYTES + (quarter ^ row) * 16;
  float4 found[MOST][2];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    if (i >= count) break;
    const unsigned at = rows_at(i);
    found[i][0] = shared_load(at + read), found[i][1] = shared_load(at + (read ^ 16));
  }
  __syncwarp();  // a row's lanes have all read it
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    if (i >= count) break;
    const unsigned at = rows_at(i);
    const SplitPair a = split(found[i][0].x, found[i][0].y);
    const SplitPair b = split(found[i][0].z, found[i][0].w);
    const SplitPair c = split(found[i][1].x, found[i][1].y);
    const SplitPair d = split(found[i][1].z, found[i][1].w);
    shared_store(at + written, a.high, b.high, c.high, d.high);
    shared_store(at + (written ^ 64), a.low, b.low, c.low, d.low);
  }
}

// After the last `split_eights`: the products, too, see what they wrote, which read by another way
// than threads write. The fence is for what comes next there as well: the copy that refills these
// rows is asked for only after threads past this barrier say that they are free.
__device__ __forceinline__ void factors_made() {
  async_fence();
  multipliers_barrier();
}

// Makes factors of COUNT rows of pixels. All multiplying threads.
template <int COUNT>
__device__ __forceinline__ void split_pixels(unsigned rows) {
  constexpr int WARPS = MULTIPLIERS / 32, ALL = COUNT / 8 / WARPS, AT_ONCE = ALL < 2 ? ALL : 2;
  static_assert(COUNT % (8 * WARPS) == 0 && ALL % AT_ONCE == 0, "warps split as many rows each");
  rows += threadIdx.x / 32 * 8 * ROW_BYTES;
#pragma unroll
  for (int done = 0; done < ALL; done += AT_ONCE) {
    split_eights<AT_ONCE>(
        [&](int i) { return rows + (done + i) * WARPS * 8 * ROW_BYTES; }, AT_ONCE);
  }
  factors_made();
}

// Adds A·Bᵀ over one tile of K, of which nobody waits before `wgmma_commit`; `a` and `b` are where
// the warpgroup's rows begin.
__device__ __forceinline__ void multiply(Products& products, unsigned a, unsigned b) {
  const unsigned long long left = matrix_descriptor(a), right = matrix_descriptor(b);
  const auto add = [&](Sums& sums, int step_a, int step_b) {
    wgmma<Factor, GROUP_N>(sums, left + step_a * STEP_OF_K, right + step_b * STEP_OF_K);
  };
  wgmma_fence();
#ifdef SPLIT
  constexpr int LOW = STEPS / 2;  // the first step of low halves
#pragma unroll
  for (int step = 0; step < LOW; ++step) add(products.main, step, step);
#pragma unroll
  for (int step = 0; step < LOW; ++step) {
    add(products.cross, step, LOW + step);
    add(products.cross, LOW + step, step);
  }
#else
#pragma unroll
  for (int step = 0; step < STEPS; ++step) add(products.main, step, step);
#endif
}

// -- the end of a tile ----------------------------------------------------------------------------

// Two pixels of one channel, as they are stored in 16 bits each.
template <typename T>
__device__ __forceinline__ unsigned pack(float first, float second);
template <typename T>
__device__ __forceinline__ float2 unpack(unsigned pair);
// max(x, 0) of both; NaN stays NaN.
template <typename T>
__device__ __forceinline__ unsigned clamp_pair(unsigned pair);

template <>
__device__ __forceinline__ unsigned pack<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <>
__device__ __forceinline__ unsigned pack<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <>
__device__ __forceinline__ float2 unpack<__half>(unsigned pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

template <>
__device__ __forceinline__ unsigned clamp_pair<__half>(unsigned pair) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0));
  return pair;
}
template <>
__device__ __forceinline__ unsigned clamp_pair<__nv_bfloat16>(unsigned pair) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(0));
  return pair;
}

// Where chunk `chunk` of a slab's row lies.
__device__ __forceinline__ unsigned slab_address(unsigned slab, int row, int chunk) {
  return slab + row * ROW_BYTES + (chunk ^ row % 8) * 16;
}

// Goes through the warpgroup's sums and their places in its slabs, the first at `slab`, one
// `pitch` after the other. `row_of(place)` is the slab's row of a place of the tile.
//
// 16-bit storage: `visit(sums of 4 matrices of 8 channels by 8 pixels, their number, address)`: lane
// i has the address of row i % 8 of matrix i / 8, for stmatrix and ldmatrix, which transpose.
// float: `visit(a sum, address)`.
template <typename RowOf, typename Visit>
__device__ __forceinline__ void visit_slabs(Sums& sums, unsigned slab, int pitch,
                                            const RowOf& row_of, const Visit& visit) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  int place = sizeof(STORAGE) == 2 ? lane / 16 * 8 + lane % 8 : lane % 4 * 2;
  if constexpr (sizeof(STORAGE) == 2) {
    const int chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j + 1 < GROUP_N / 8; j += 2) {
      visit(sums + 4 * j, 4, slab_address(slab, row_of(8 * j + place), chunk));
    }
    if constexpr (GROUP_N / 8 % 2) {  // two matrices: the upper lanes' addresses are not used
      constexpr int LAST = GROUP_N / 8 - 1;
      visit(sums + 4 * LAST, 2, slab_address(slab, row_of(8 * LAST + place % 8), chunk));
    }
  } else {
    asm volatile("" : "+r"(place));  // or addresses are kept, in registers that there are not, from
                                     // one visit to the next
    const unsigned at = slab + warp / 2 * pitch;
    const int chunk = warp % 2 * 4 + lane / 16, word = lane / 4 % 4 * 4;
#pragma unroll
    for (int j = 0; j < GROUP_N / 8; ++j) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int row = row_of(8 * j + place + v);
        visit(sums + 4 * j + v, 1, slab_address(at, row, chunk) + word);
        visit(sums + 4 * j + 2 + v, 1, slab_address(at, row, chunk + 2) + word);
      }
    }
  }
}

// sums += bias, of the lane's two channels; `channel0` is the warpgroup's first.
__device__ __forceinline__ void add_bias(Sums& sums, const ConvShape& p, const float* bias,
                                         int channel0) {
  const int channel = channel0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const float low = channel < p.o ? bias[channel] : 0.0f;
  const float high = channel + 8 < p.o ? bias[channel + 8] : 0.0f;
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) sums[i] += i % 4 < 2 ? low : high;
}

// Adds what is stored at `address` to sums, see `visit_slabs`.
template <typename T>
__device__ __forceinline__ void add_stored(float* sums, int matrices, unsigned address) {
  if constexpr (sizeof(T) == 2) {
    unsigned found[4];
    if (matrices == 4) {
      load_transposed(found, address);
    } else {
      load_transposed_pair(found, address);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= matrices) break;
      const float2 pair = unpack<T>(found[i]);
      sums[2 * i] += pair.x, sums[2 * i + 1] += pair.y;
    }
  } else {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    *sums += value;
  }
}

// Stores sums at `address`, clamped at zero if so wished; rounding and clamping change places.
template <typename T>
__device__ __forceinline__ void store_rounded(const float* sums, int matrices, unsigned address,
                                              bool relu) {
  if constexpr (sizeof(T) == 2) {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < matrices) pairs[i] = pack<T>(sums[2 * i], sums[2 * i + 1]);
      if (i < matrices && relu) pairs[i] = clamp_pair<T>(pairs[i]);
    }
    if (matrices == 4) {
      store_transposed(address, pairs);
    } else {
      store_transposed_pair(address, pairs);
    }
  } else {
    float sum = *sums;
    if (relu) asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(sum));
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
  }
}

// sums += residual, which lies in the warpgroup's slabs.
template <typename RowOf>
__device__ __forceinline__ void add_residual(Sums& sums, unsigned slab, int pitch,
                                             const RowOf& row_of) {
  visit_slabs(sums, slab, pitch, row_of, add_stored<STORAGE>);
}

// The sums, as they are stored, into the warpgroup's slabs.
template <typename RowOf>
__device__ __forceinline__ void fill_slabs(Sums& sums, unsigned slab, int pitch,
                                           const RowOf& row_of, bool relu) {
  const auto fill = [&](bool clamps) {
    visit_slabs(sums, slab, pitch, row_of, [=](float* some, int matrices, unsigned address) {
      store_rounded<STORAGE>(some, matrices, address, clamps);
    });
  };
  if (relu) {
    fill(true);
  } else {
    fill(false);
  }
}
