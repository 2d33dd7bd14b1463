// Convolution as a matrix product on Hopper's tensor cores, of pixels gathered from the image and of
// float32 factors that are multiplied as two float16 numbers each, see split.cuh. NHWC.
//
// For few tiles, where each waits by itself. Rows of A are output pixels, rows of B channels: each
// thread reads the pixels that it multiplies from shared memory, splits them, and hands them on from
// registers, without waiting for others. Weights come split, 32 high halves and then 32 low ones in
// 128 bytes.
#include "mma/split.cuh"
#include "hopper/gather.cuh"

constexpr int HALF_STEPS = STEPS / 2;  // of high halves, and then of low ones
constexpr int BUFFERS = 2;  // a tile's factors are made while those of the one before are multiplied

static_assert(sizeof(STORAGE) == 4, "float32 is split");
static_assert(TILE_GROUPS_M == 1 && TILE_N == 64 * TILE_GROUPS_N, "a warpgroup has 64 pixels");
static_assert(TILE_M <= 64, "two sums of each output, and factors twice, are in registers");

using Sums = float[TILE_M / 2];  // of a thread, see wgmma.cuh

// A thread's pixels of a tile of K, as the instruction wants them: of each step rows i and i + 8 at
// columns 2·q and the next, and at 8 more, of lane 4·i + q.
struct Factors {
  unsigned high[HALF_STEPS][4], low[HALF_STEPS][4];
};

__device__ __forceinline__ float2 load_pair(unsigned address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(address)
               : "memory");
  return pair;
}

__device__ __forceinline__ void store_pair(unsigned address, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair.x), "f"(pair.y)
               : "memory");
}

// What a warpgroup does of a tile: its 64 pixels, 16 a warp. Rows of its matrix are the pixels in
// another order: those of four times four lanes, whose accesses go together, are each second pixel,
// so that their 32 bytes lie in all 32 banks.
struct Group {
  const unsigned tiles;
  const int pixel;        // the lane's first, of the tile; its second is 8 more
  const unsigned places;  // where the lane's first two channels lie in the first, of 128 bytes
  Sums main = {}, cross = {};  // products of high halves; of a high and a low half
  Factors factors[BUFFERS];

  __device__ __forceinline__ Group(unsigned tiles, int warpgroup)
      : tiles(tiles),
        pixel(warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + row()),
        places((threadIdx.x % 4 / 2 ^ row()) * 16 + threadIdx.x % 2 * 8) {}

  // Of the eight pixels that are one in eight rows: chunks are permuted by it.
  static __device__ __forceinline__ int row() {
    const int i = threadIdx.x % 32 / 4;
    return i % 4 * 2 + i / 4;
  }

  // Where the lane's channels 8·eight + 2·q and the next of its first pixel lie, in rows of 128
  // bytes.
  __device__ __forceinline__ unsigned place(unsigned rows, int eight) const {
    return rows + pixel * ROW_BYTES + (places ^ eight * 32);
  }

  __device__ __forceinline__ void make_factors(Factors& made, unsigned pixels) const {
#pragma unroll
    for (int eight = 0; eight < 2 * HALF_STEPS; ++eight) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const float2 pair = load_pair(place(pixels, eight) + second * 8 * ROW_BYTES);
        const SplitPair halves = split(pair.x, pair.y);
        made.high[eight / 2][eight % 2 * 2 + second] = halves.high;
        made.low[eight / 2][eight % 2 * 2 + second] = halves.low;
      }
    }
  }

  // One tile of K.
  __device__ __forceinline__ void multiply(const Factors& a, unsigned weights) {
    const unsigned long long b = matrix_descriptor(weights);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HALF_STEPS; ++step) {
      wgmma_registers<TILE_M>(main, a.high[step], b + step * STEP_OF_K);
    }
#pragma unroll
    for (int step = 0; step < HALF_STEPS; ++step) {
      wgmma_registers<TILE_M>(cross, a.high[step], b + (HALF_STEPS + step) * STEP_OF_K);
      wgmma_registers<TILE_M>(cross, a.low[step], b + step * STEP_OF_K);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ Turn multiply_all(const Ring& ring, int count) {
    const bool speaks = threadIdx.x % 32 == 0;  // of its warp
    Turn turn;
    int before = -1;  // the stage whose products are under way
    const auto next = [&](Factors& made) {
      barrier_wait(ring.full(turn.stage), turn.parity);
      make_factors(made, tiles + turn.stage * STAGE_BYTES + BYTES_A);
      multiply(made, tiles + turn.stage * STAGE_BYTES);
      wgmma_wait<1>();  // all but these products have read their stage, and their factors
      if (before >= 0 && speaks) barrier_arrive(ring.empty(before));
      before = turn.stage;
      turn.advance(TILE_STAGES);
    };
    for (int k = 0; k < count / BUFFERS; ++k) {
#pragma unroll
      for (int i = 0; i < BUFFERS; ++i) next(factors[i]);
    }
    if (count % BUFFERS) next(factors[0]);
    wgmma_wait<0>();
    if (before >= 0 && speaks) barrier_arrive(ring.empty(before));
#pragma unroll
    for (int i = 0; i < TILE_M / 2; ++i) main[i] = fmaf(cross[i], 1 / LOW_SCALE, main[i]);
    return turn;
  }

  __device__ __forceinline__ void add_bias(const ConvShape& p, const float* bias, int channel0) {
#pragma unroll
    for (int j = 0; j < TILE_M / 8; ++j) {
      const int channel = channel0 + 8 * j + threadIdx.x % 4 * 2;
      if (channel >= p.o) break;  // they come in fours
      const float2 pair = *reinterpret_cast<const float2*>(bias + channel);
      main[4 * j] += pair.x, main[4 * j + 1] += pair.y;
      main[4 * j + 2] += pair.x, main[4 * j + 3] += pair.y;
    }
  }

  // `visit(two sums, address)` of the lane's channels in a slab.
  template <typename Visit>
  __device__ __forceinline__ void visit_slab(int slab, unsigned at, const Visit& visit) {
#pragma unroll
    for (int eight = 0; eight < SLAB_CHANNELS / 8; ++eight) {
      float* sums = main + 4 * (slab * SLAB_CHANNELS / 8 + eight);
      visit(sums, place(at, eight));
      visit(sums + 2, place(at, eight) + 8 * ROW_BYTES);
    }
  }

  __device__ __forceinline__ void add_slab(int slab, unsigned at) {
#pragma unroll
    for (int i = 0; i < SLABS; ++i) {  // sums are registers, which a number names that is known
      if (i != slab) continue;
      visit_slab(i, at, [](float* sums, unsigned address) {
        const float2 pair = load_pair(address);
        sums[0] += pair.x, sums[1] += pair.y;
      });
    }
  }

  __device__ __forceinline__ void fill_slabs(unsigned slabs, bool relu) {
#pragma unroll
    for (int i = 0; i < SLABS; ++i) {
      visit_slab(i, slabs + i * BYTES_B, [=](float* sums, unsigned address) {
        float2 pair{sums[0], sums[1]};
        if (relu) pair = {::relu(pair.x), ::relu(pair.y)};
        store_pair(address, pair);
      });
    }
  }

#if TILE_PARTS > 1
  __device__ __forceinline__ void lay_down(float* tile) {
    float* at = tile + pixel * PITCH + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < TILE_M / 8; ++j) {
      *reinterpret_cast<float2*>(at + 8 * j) = {main[4 * j], main[4 * j + 1]};
      *reinterpret_cast<float2*>(at + 8 * PITCH + 8 * j) = {main[4 * j + 2], main[4 * j + 3]};
    }
  }
#endif
};

#include "hopper/gather_kernel.cuh"
