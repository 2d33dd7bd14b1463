// Products of a tile with both operands in shared memory, and its epilogue as channels of pixels.
//
// Rows of A are output channels, rows of B output pixels: also a tile with few channels, as in the
// first layers, then uses instructions with a large N. The including file defines STORAGE and
// TILE_* and includes this once.
//
// SPLIT (fp16x3): float32 operands are multiplied as two float16 numbers each (mma/split.cuh), and
// sums are promoted (promotion.cuh).
// The host packs weights as 32 high halves, then 32 low halves in 128 bytes; pixels are split in
// place in shared memory.
#pragma once
#include "common/storage.cuh"
#include "mma/split.cuh"
#include "mma/transposed_matrices.cuh"
#include "hopper/pipeline.cuh"

constexpr int GROUP_N = TILE_N / TILE_GROUPS_N;  // pixels per warpgroup
constexpr int SLABS_GROUP = 64 / SLAB_CHANNELS;

static_assert(TILE_M == 64 * TILE_GROUPS_M, "a warpgroup multiplies 64 channels");
static_assert(TILE_N % TILE_GROUPS_N == 0 && GROUP_N % 8 == 0,
              "a warpgroup's pixels begin at a multiple of 1024 bytes");

using Accumulator = float[GROUP_N / 2];  // of a thread; layout in wgmma.cuh

#ifdef SPLIT
constexpr bool SPLITS = true;
using Operand = __half;

static_assert(sizeof(STORAGE) == 4, "a row of 128 bytes is split into as many");
#else
constexpr bool SPLITS = false;
using Operand = STORAGE;
#endif

#ifdef SPLIT
#include "hopper/promotion.cuh"

using Accumulators = PromotedAccumulators<GROUP_N>;
#else
// A thread's accumulators.
struct Accumulators {
  Accumulator main = {};

  // The sums, after the last product.
  __device__ __forceinline__ Accumulator& fold() { return main; }
};
#endif

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

// Splits rows of pixels in place: 32 floats of 128 bytes become 32 high and 32 low halves, with the
// same swizzle. A warp splits eight rows at each of `rows_at(0)` to `rows_at(count - 1)`, multiples
// of 1024. Call `operands_ready` with all consumer threads afterwards.
//
// Four lanes share a row; each reads two chunks of floats and writes one chunk of high and one of
// low halves. Bank conflicts: the eight lanes of one access phase take rows i and i ^ 5, which
// differ in parity and in bit 2, so reads and writes touch all 32 banks.
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
  __syncwarp();  // all lanes of a row have read it
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

// After the last `split_eights`: makes the writes visible to `wgmma`, which reads through the async
// proxy. NOTE: the fence also orders these writes before the TMA load that refills the rows,
// because that load is issued only after threads past this barrier have arrived at the empty
// mbarrier.
__device__ __forceinline__ void operands_ready() {
  fence_async_proxy();
  consumers_barrier();
}

// Splits COUNT rows of pixels. All consumer threads.
template <int COUNT>
__device__ __forceinline__ void split_pixels(unsigned rows) {
  constexpr int WARPS = CONSUMERS / 32, ALL = COUNT / 8 / WARPS, AT_ONCE = ALL < 2 ? ALL : 2;
  static_assert(COUNT % (8 * WARPS) == 0 && ALL % AT_ONCE == 0,
                "every warp splits the same number of rows");
  rows += threadIdx.x / 32 * 8 * ROW_BYTES;
#pragma unroll
  for (int done = 0; done < ALL; done += AT_ONCE) {
    split_eights<AT_ONCE>(
        [&](int i) { return rows + (done + i) * WARPS * 8 * ROW_BYTES; }, AT_ONCE);
  }
  operands_ready();
}

#ifndef SPLIT
// Issues A·Bᵀ over one K tile; complete after `wgmma_commit` and a wait. `a` and `b` are where the
// warpgroup's rows begin.
__device__ __forceinline__ void multiply(Accumulators& accumulators, unsigned a, unsigned b) {
  const unsigned long long left = swizzle_128b_descriptor(a), right = swizzle_128b_descriptor(b);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    wgmma<Operand, GROUP_N>(accumulators.main, left + step * K_STEP, right + step * K_STEP);
  }
}
#endif

#ifdef SPLIT
// The products of one K tile for `multiply_promoted`, from descriptors.
struct TileProducts {
  static constexpr int LOW = STEPS / 2;  // the first K step of low halves
  static constexpr unsigned long long EIGHT_ROWS = 8 * ROW_BYTES / 16;

  const unsigned long long left, right;

  __device__ __forceinline__ void add_cross(Accumulator& cross, int step) const {
    wgmma<Operand, GROUP_N>(cross, left + step * K_STEP, right + (LOW + step) * K_STEP);
    wgmma<Operand, GROUP_N>(cross, left + (LOW + step) * K_STEP, right + step * K_STEP);
  }

  template <int FIRST, int COUNT>
  __device__ __forceinline__ void add_main(float (&part)[COUNT / 2], int step) const {
    const unsigned long long a = left + step * K_STEP;
    const unsigned long long b = right + FIRST / 8 * EIGHT_ROWS + step * K_STEP;
    if (step == 0) {
      wgmma_begin<Operand, COUNT>(part, a, b);
    } else {
      wgmma<Operand, COUNT>(part, a, b);
    }
  }
};
#endif

// Multiplies one K tile, and calls `previous_read` once the products of the tile before have read
// their operands. The products of this tile are in flight on return.
template <typename PreviousRead>
__device__ __forceinline__ void multiply_next(Accumulators& accumulators, unsigned a, unsigned b,
                                              const PreviousRead& previous_read) {
#ifdef SPLIT
  const TileProducts products{swizzle_128b_descriptor(a), swizzle_128b_descriptor(b)};
  multiply_promoted(accumulators, products, previous_read);
#else
  multiply(accumulators, a, b);
  wgmma_commit();
  wgmma_wait<1>();  // all but these products have read their operands
  previous_read();
#endif
}

// -- epilogue -------------------------------------------------------------------------------------

// Two pixels of one channel in 16-bit storage.
template <typename T>
__device__ __forceinline__ unsigned pack(float first, float second);
template <typename T>
__device__ __forceinline__ float2 unpack(unsigned pair);
// max(x, 0) of both; keeps NaN.
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

// The swizzled address of a chunk of a slab's row.
__device__ __forceinline__ unsigned slab_address(unsigned slab, int row, int chunk) {
  return slab + row * ROW_BYTES + (chunk ^ row % 8) * 16;
}

// Visits the warpgroup's accumulators with their addresses in its slabs, the first at `slab`,
// `pitch` bytes apart. `row_of(place)` maps a pixel of the tile to its row in the slab.
//
// 16-bit storage: `visit(accumulators of 4 matrices of 8 channels by 8 pixels, matrix count,
// address)`, where lane i has the address of row i % 8 of matrix i / 8, for transposing stmatrix
// and ldmatrix. float: `visit(one accumulator, address)`.
template <typename RowOf, typename Visit>
__device__ __forceinline__ void visit_slabs(Accumulator& acc, unsigned slab, int pitch,
                                            const RowOf& row_of, const Visit& visit) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  int place = sizeof(STORAGE) == 2 ? lane / 16 * 8 + lane % 8 : lane % 4 * 2;
  if constexpr (sizeof(STORAGE) == 2) {
    const int chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j + 1 < GROUP_N / 8; j += 2) {
      visit(acc + 4 * j, 4, slab_address(slab, row_of(8 * j + place), chunk));
    }
    if constexpr (GROUP_N / 8 % 2) {  // two matrices: the upper lanes' addresses are unused
      constexpr int LAST = GROUP_N / 8 - 1;
      visit(acc + 4 * LAST, 2, slab_address(slab, row_of(8 * LAST + place % 8), chunk));
    }
  } else {
    // Recompute addresses for each visit: keeping them would spill registers.
    asm volatile("" : "+r"(place));
    const unsigned at = slab + warp / 2 * pitch;
    const int chunk = warp % 2 * 4 + lane / 16, word = lane / 4 % 4 * 4;
#pragma unroll
    for (int j = 0; j < GROUP_N / 8; ++j) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int row = row_of(8 * j + place + v);
        visit(acc + 4 * j + v, 1, slab_address(at, row, chunk) + word);
        visit(acc + 4 * j + 2 + v, 1, slab_address(at, row, chunk + 2) + word);
      }
    }
  }
}

// Adds the bias of the lane's two channels; `channel0` is the warpgroup's first.
__device__ __forceinline__ void add_bias(Accumulator& acc, const ConvShape& p, const float* bias,
                                         int channel0) {
  const int channel = channel0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const float low = channel < p.o ? bias[channel] : 0.0f;
  const float high = channel + 8 < p.o ? bias[channel + 8] : 0.0f;
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) acc[i] += i % 4 < 2 ? low : high;
}

// Adds the values in shared memory at `address`; see `visit_slabs`.
template <typename T>
__device__ __forceinline__ void add_stored(float* acc, int matrices, unsigned address) {
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
      acc[2 * i] += pair.x, acc[2 * i + 1] += pair.y;
    }
  } else {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    *acc += value;
  }
}

// Rounds, applies ReLU if wanted, and writes to `address`. ReLU after rounding gives the same
// result.
template <typename T>
__device__ __forceinline__ void store_rounded(const float* acc, int matrices, unsigned address,
                                              bool relu) {
  if constexpr (sizeof(T) == 2) {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < matrices) pairs[i] = pack<T>(acc[2 * i], acc[2 * i + 1]);
      if (i < matrices && relu) pairs[i] = clamp_pair<T>(pairs[i]);
    }
    if (matrices == 4) {
      store_transposed(address, pairs);
    } else {
      store_transposed_pair(address, pairs);
    }
  } else {
    float sum = *acc;
    if (relu) asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(sum));
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(to_output(sum)) : "memory");
  }
}

// Adds the residual from the warpgroup's slabs.
template <typename RowOf>
__device__ __forceinline__ void add_residual(Accumulator& acc, unsigned slab, int pitch,
                                             const RowOf& row_of) {
  visit_slabs(acc, slab, pitch, row_of, add_stored<STORAGE>);
}

// Writes the outputs in storage format to the warpgroup's slabs.
template <typename RowOf>
__device__ __forceinline__ void fill_slabs(Accumulator& acc, unsigned slab, int pitch,
                                           const RowOf& row_of, bool relu) {
  const auto fill = [&](bool clamps) {
    visit_slabs(acc, slab, pitch, row_of, [=](float* some, int matrices, unsigned address) {
      store_rounded<STORAGE>(some, matrices, address, clamps);
    });
  };
  if (relu) {
    fill(true);
  } else {
    fill(false);
  }
}
