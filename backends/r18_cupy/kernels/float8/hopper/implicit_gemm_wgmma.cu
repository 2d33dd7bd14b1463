// Convolution of e4m3 numbers as implicit GEMM on Hopper: D[channels][pixels] = W · im2col(x). NHWC.
//
// A CTA computes tiles in turn.
// 1. A producer warp loads K tiles into a ring of stages: weights by TMA, pixels by TMA in im2col
//    mode. K runs over the window's positions, and at each over the channels, TILE_K at a time.
// 2. Consumer warpgroups multiply the stages with `wgmma`. Every RUN K tiles they add the sum to
//    float32 registers: the unit itself keeps too few bits (hopper/tile.cuh).
// 3. Epilogue: multiplier, bias, residual and ReLU. TMA loads the residual during the products, and
//    stores the outputs, which ends during the next tile's products; the first stages of that tile
//    are loaded by then. With TILE_PARTS > 1 the CTAs of a cluster divide K and add their sums
//    first (split-K).
//
// Constraints: sm_90a; C and O multiples of 16; what TMA's im2col mode encodes (stride ≤ 8, window
// ≤ 256); tiles as `TILES` in float8/implicit_gemm_wgmma.py lists them.
#include "float8/hopper/tile.cuh"

constexpr int BYTES_A = TILE_M * TILE_K, BYTES_B = TILE_N * TILE_K;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;
constexpr int SLAB_BYTES = GROUP_N * SLAB_ROW;  // per warpgroup

// Promoted sums take two registers for each output. Where a warp of producers would leave the
// consumers too few, there is a warpgroup of them, and it gives registers away.
constexpr bool GIVES_REGISTERS = GROUP_N > 128;
constexpr int PRODUCERS = GIVES_REGISTERS ? 128 : 32;
constexpr int PRODUCER_REGISTERS = GIVES_REGISTERS ? 40 : 0;
constexpr int CONSUMER_REGISTERS = GIVES_REGISTERS ? 232 : 0;

static_assert(!GIVES_REGISTERS || (WARPGROUPS == 2 && TILE_BLOCKS == 1),
              "three warpgroups are launched with 168 registers a thread");
static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");
static_assert(BYTES_A % 1024 == 0 && STAGE_BYTES % 1024 == 0 && SLAB_BYTES % 512 == 0,
              "swizzled rows are aligned");

// The part of the tile that a warpgroup computes: 64 channels from `m`, GROUP_N pixels from `n`.
struct Part {
  int m, n;
};

__device__ __forceinline__ Part part_of(int warpgroup) {
  return {warpgroup / TILE_GROUPS_N * 64, warpgroup % TILE_GROUPS_N * GROUP_N};
}

// A tile's first channel and pixel.
struct Tile {
  int channel0;
  unsigned pixel0;
};

// Tile index: pixels, and channels innermost.
__device__ __forceinline__ Tile tile_at(unsigned index, const ConvShape& p) {
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  return {(int)(index % channel_tiles) * TILE_M, index / channel_tiles * TILE_N};
}

// Where the window of an output pixel begins.
__device__ __forceinline__ WindowCorner corner_at(unsigned pixel, const ConvShape& p) {
  const unsigned column = pixel % p.ow, line = pixel / p.ow;
  return {(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph, (int)(line / p.oh)};
}

// The producer: of each tile the K tiles [first, last), and the residual. One thread. The weights of
// the first stages are loaded before the previous launch has ended; everything else waits for it.
__device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& weight,
                                        const TensorMap& residual, const ConvShape& p,
                                        const Ring& ring, const Ring& slab_ring, unsigned stages,
                                        unsigned slabs, int tiles, int first, int last,
                                        bool loads_residual) {
  const int runs = (p.c + TILE_K - 1) / TILE_K;  // chunks of channels at each position
  const int run0 = first % runs, s0 = first / runs % p.kw, r0 = first / runs / p.kw;
  const int ahead = min(TILE_STAGES, last - first);
  Tile at = tile_at(blockIdx.x, p);
  WindowCorner corner = corner_at(at.pixel0, p);  // divides, so not behind the wait
  const auto load_weights = [&](int k, int stage) {
    mbarrier_arrive_expect_tx(ring.full(stage), STAGE_BYTES);
    tma_load(stages + stage * STAGE_BYTES, weight, ring.full(stage), k * TILE_K, at.channel0);
  };
  for (int i = 0; i < ahead; ++i) load_weights(first + i, i);
  wait_for_previous_launch();
  RingState state;
  int issued = 0;  // K tiles
  unsigned slab_phase = 1;
  for (int index = blockIdx.x;;) {
    int run = run0, s = s0, r = r0;
    for (int k = first; k < last; ++k, ++issued, state.advance(TILE_STAGES)) {
      if (issued >= TILE_STAGES) mbarrier_wait(ring.empty(state.stage), state.phase ^ 1);
      if (issued >= ahead) load_weights(k, state.stage);
      tma_load_im2col(stages + state.stage * STAGE_BYTES + BYTES_A, x, ring.full(state.stage),
                      run * TILE_K, corner, r, s);
      if (++run == runs) {
        run = 0;
        if (++s == p.kw) s = 0, ++r;
      }
      if (loads_residual && k == first + ahead - 1) {  // behind the first stages
        if (index >= (int)gridDim.x) mbarrier_wait(slab_ring.empty(0), slab_phase);
        mbarrier_arrive_expect_tx(slab_ring.full(0), WARPGROUPS * SLAB_BYTES);
        for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
          const Part part = part_of(warpgroup);
          tma_load(slabs + warpgroup * SLAB_BYTES, residual, slab_ring.full(0),
                   at.channel0 + part.m, (int)at.pixel0 + part.n);
        }
      }
    }
    index += gridDim.x, slab_phase ^= 1;
    if (TILE_PARTS > 1 || index >= tiles) break;
    at = tile_at(index, p);
    corner = corner_at(at.pixel0, p);
  }
}

// Multiplies `count` K tiles; with split-K there may be none. `overlapped` is called once, while
// products are in flight.
//
// The first run of the second warpgroup is shorter. Otherwise both would wait for their sums at the
// same time, and the tensor cores for both.
template <typename Overlapped>
__device__ __forceinline__ void mainloop(Numbers& sums, const Ring& ring, RingState& state,
                                         unsigned a, unsigned b, int count,
                                         const Overlapped& overlapped) {
  const bool elected = threadIdx.x % 32 == 0;
#pragma unroll
  for (int i = 0; i < GROUP_N / 2; ++i) sums[i] = 0.0f;
  Numbers part;
  int end = threadIdx.x < 128 ? RUN : RUN - RUN / 2;
  for (int k = 0; k < count; end += RUN) {
    int before = -1;  // the stage of the run's previous K tile
    for (const int last = min(end, count); k < last; ++k, state.advance(TILE_STAGES)) {
      mbarrier_wait(ring.full(state.stage), state.phase);
      wgmma_fence();
      multiply(part, row_descriptor<TILE_K>(a + state.stage * STAGE_BYTES),
               row_descriptor<TILE_K>(b + state.stage * STAGE_BYTES), before < 0);
      wgmma_commit();
      if (k == min(count, 3) - 1) overlapped();
      wgmma_wait<1>();  // all but these products have read their stage
      if (before >= 0 && elected) mbarrier_arrive(ring.empty(before));
      before = state.stage;
    }
    wgmma_wait<0>();
    if (elected) mbarrier_arrive(ring.empty(before));
    promote(sums, part);
  }
}

#if TILE_PARTS > 1
#include "float8/hopper/cluster_split_k.cuh"
#define IN_CLUSTER __cluster_dims__(1, TILE_PARTS, 1)
#else
#define IN_CLUSTER
#endif

// Grid: x, the CTAs that are resident at once, or one per tile if there are fewer or if K is split;
// y, the splits of K, one cluster. `residual` and `residual_multiplier` may be null; the descriptor
// is then unused. NOTE: `residual` is not __restrict__, or the compiler could read what the
// previous launch still writes ahead of the wait.
extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, TILE_BLOCKS) IN_CLUSTER
sconv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                            const __grid_constant__ TensorMap weight,
                            const __grid_constant__ TensorMap residual_map,
                            const __grid_constant__ TensorMap out_map,
                            const float* __restrict__ bias, const float* __restrict__ multiplier,
                            const unsigned char* residual,
                            const float* __restrict__ residual_multiplier,
                            unsigned char* __restrict__ out, const ConvShape p, const int tiles,
                            const int k_tiles) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* shared = aligned_shared(dynamic);
  const unsigned stages = shared_address(shared);
  const unsigned slabs = stages + TILE_STAGES * STAGE_BYTES;
  constexpr int SLABS_BYTES = TILE_PARTS == 1 ? WARPGROUPS * SLAB_BYTES : 0;
  const Ring ring{slabs + SLABS_BYTES, TILE_STAGES, CONSUMERS / 32};
  const Ring slab_ring{ring.end(), 1, WARPGROUPS};
  const int first = (int)blockIdx.y * k_tiles / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * k_tiles / TILE_PARTS;

  begin_block(x, weight, residual_map, out_map, ring, slab_ring);

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == WARPGROUPS) {
    release_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == CONSUMERS) {
      produce(x, weight, residual_map, p, ring, slab_ring, stages, slabs, tiles, first, last,
              TILE_PARTS == 1 && residual);
    }
    return;
  }
  acquire_registers<CONSUMER_REGISTERS>();

  const Part part = part_of(warpgroup);
  const unsigned a = stages + part.m * TILE_K, b = stages + BYTES_A + part.n * TILE_K;
  RingState state;
  Numbers sums;
#if TILE_PARTS == 1
  const unsigned slab = slabs + warpgroup * SLAB_BYTES;
  const bool storing = threadIdx.x % 128 == 0;  // the thread that stores the warpgroup's outputs
  unsigned slab_phase = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x, slab_phase ^= 1) {
    const Tile at = tile_at(index, p);
    const bool again = index >= (int)gridDim.x;
    const int channel = at.channel0 + part.m;
    const Finishing by(p, bias, multiplier, residual_multiplier, channel);
    mainloop(sums, ring, state, a, b, last - first, [&] {
      if (!again || !storing) return;
      tma_store_wait();  // the outputs of the last tile have left the slab
      if (residual) mbarrier_arrive(slab_ring.empty(0));
    });
    if (residual) {
      mbarrier_wait(slab_ring.full(0), slab_phase);
    } else {
      warpgroup_barrier(warpgroup);  // behind the wait of the storing thread
    }
    finish(sums, slab, by, [](int place) { return place; });
    fence_async_proxy();
    warpgroup_barrier(warpgroup);
    if (storing) {
      if (!again) wait_for_previous_launch();
      if (channel < p.o) tma_store(out_map, channel, (int)at.pixel0 + part.n, slab);
      tma_store_commit();
    }
  }
  if (storing) tma_store_wait();
#else
  mainloop(sums, ring, state, a, b, last - first, [] {});
  asm volatile("bar.sync 3, %0;" ::"n"(CONSUMERS) : "memory");  // all stages have been read
  const Tile at = tile_at(blockIdx.x, p);
  reduce_split_k(sums, part, reinterpret_cast<float*>(shared), p, at.pixel0, at.channel0, bias,
                 multiplier, residual, residual_multiplier, out);
#endif
}
