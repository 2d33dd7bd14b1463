// Convolution of integers as implicit GEMM on Hopper: D[channels][pixels] = W · im2col(x). NHWC.
//
// 1. A producer warp loads K tiles into a ring of stages: weights by TMA, pixels by TMA in im2col
//    mode. K runs over the window's positions, and at each over the channels, TILE_K at a time.
// 2. Consumer warpgroups multiply the stages with `wgmma` and add up in int32 registers.
// 3. Epilogue: requantisation with the residual, which TMA has brought meanwhile, and TMA stores.
//    With TILE_PARTS > 1 the CTAs of a cluster divide K and add their sums first (split-K).
//
// Constraints: sm_90a; C and O multiples of 16; what TMA's im2col mode encodes (stride ≤ 8, window
// ≤ 256); tiles as `tiles_of` in integers/implicit_gemm_wgmma.py lists them.
#include "integers/hopper/tile.cuh"

constexpr int BYTES_A = TILE_M * TILE_K, BYTES_B = TILE_N * TILE_K;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;
constexpr int SLAB_BYTES = GROUP_N * SLAB_ROW;  // per warpgroup

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

// The producer: K tiles [first, last), and the residual. One thread. The weights of the first
// stages are loaded before the previous launch has ended; everything else waits for it.
__device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& weight,
                                        const TensorMap& residual, const ConvShape& p,
                                        const Ring& ring, const Ring& slab_ring, unsigned stages,
                                        unsigned slabs, unsigned pixel0, int channel0, int first,
                                        int last, bool loads_residual) {
  const unsigned column = pixel0 % p.ow, line = pixel0 / p.ow;
  const WindowCorner corner{(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph,
                            (int)(line / p.oh)};
  const int runs = (p.c + TILE_K - 1) / TILE_K;  // chunks of channels at each position
  int run = first % runs, s = first / runs % p.kw, r = first / runs / p.kw;
  const auto load_weights = [&](int k, int stage) {
    mbarrier_arrive_expect_tx(ring.full(stage), STAGE_BYTES);
    tma_load(stages + stage * STAGE_BYTES, weight, ring.full(stage), k * TILE_K, channel0);
  };
  for (int i = 0; i < TILE_STAGES && first + i < last; ++i) load_weights(first + i, i);
  wait_for_previous_launch();
  RingState state;
  for (int k = first; k < last; ++k, state.advance(TILE_STAGES)) {
    if (k - first >= TILE_STAGES) {
      mbarrier_wait(ring.empty(state.stage), state.phase ^ 1);
      load_weights(k, state.stage);
    }
    tma_load_im2col(stages + state.stage * STAGE_BYTES + BYTES_A, x, ring.full(state.stage),
                    run * TILE_K, corner, r, s);
    if (++run == runs) {
      run = 0;
      if (++s == p.kw) s = 0, ++r;
    }
    if (loads_residual && k == min(first + TILE_STAGES, last) - 1) {  // behind the first stages
      mbarrier_arrive_expect_tx(slab_ring.full(0), WARPGROUPS * SLAB_BYTES);
      for (int warpgroup = 0; warpgroup < WARPGROUPS; ++warpgroup) {
        const Part part = part_of(warpgroup);
        tma_load(slabs + warpgroup * SLAB_BYTES, residual, slab_ring.full(0), channel0 + part.m,
                 (int)pixel0 + part.n);
      }
    }
  }
}

// Multiplies `count` K tiles.
__device__ __forceinline__ void mainloop(Sums& sums, const Ring& ring, unsigned a, unsigned b,
                                         int count) {
  const bool elected = threadIdx.x % 32 == 0;
  RingState state;
  int before = 0;  // the stage of the previous tile
  for (int k = 0; k < count; ++k, state.advance(TILE_STAGES)) {
    mbarrier_wait(ring.full(state.stage), state.phase);
    multiply(sums, a + state.stage * STAGE_BYTES, b + state.stage * STAGE_BYTES);
    wgmma_commit();
    wgmma_wait<1>();  // all but these products have read their stage
    if (k > 0 && elected) mbarrier_arrive(ring.empty(before));
    before = state.stage;
  }
  wgmma_wait<0>();
}

#if TILE_PARTS > 1
#include "integers/hopper/cluster_split_k.cuh"
#define IN_CLUSTER __cluster_dims__(1, TILE_PARTS, 1)
#else
#define IN_CLUSTER
#endif

// Grid: x, tiles of pixels and, innermost, of channels; y, the splits of K, one cluster.
// `residual` and `residual_multiplier` may be null; the descriptor is then unused. NOTE: `residual`
// is not __restrict__, or the compiler could read what the previous launch still writes ahead of
// the wait.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS) IN_CLUSTER
qconv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                            const __grid_constant__ TensorMap weight,
                            const __grid_constant__ TensorMap residual_map,
                            const __grid_constant__ TensorMap out_map,
                            const int* __restrict__ bias, const float* __restrict__ multiplier,
                            const unsigned char* residual,
                            const float* __restrict__ residual_multiplier,
                            const int residual_signed, unsigned char* __restrict__ out,
                            const ConvShape p, const int k_tiles) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* shared = aligned_shared(dynamic);
  const unsigned stages = shared_address(shared);
  const unsigned slabs = stages + TILE_STAGES * STAGE_BYTES;
  constexpr int SLABS_BYTES = TILE_PARTS == 1 ? WARPGROUPS * SLAB_BYTES : 0;
  const Ring ring{slabs + SLABS_BYTES, TILE_STAGES, CONSUMERS / 32};
  const Ring slab_ring{ring.end(), 1, 1};
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const unsigned pixel0 = blockIdx.x / channel_tiles * TILE_N;
  const int channel0 = blockIdx.x % channel_tiles * TILE_M;
  const int first = (int)blockIdx.y * k_tiles / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * k_tiles / TILE_PARTS;

  begin_block(x, weight, residual_map, out_map, ring, slab_ring);

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == WARPGROUPS) {
    if (threadIdx.x % 32 == 0) {
      produce(x, weight, residual_map, p, ring, slab_ring, stages, slabs, pixel0, channel0, first,
              last, TILE_PARTS == 1 && residual);
    }
    return;
  }

  const Part part = part_of(warpgroup);
#if TILE_PARTS == 1
  const Requantization by(p, multiplier, residual_multiplier, residual_signed, channel0 + part.m);
  Sums sums;
  begin_sums(sums, p, bias, channel0 + part.m);
#else
  Sums sums = {};  // the cluster adds the bias
#endif
  mainloop(sums, ring, stages + part.m * TILE_K, stages + BYTES_A + part.n * TILE_K, last - first);
#if TILE_PARTS == 1
  if (residual) mbarrier_wait(slab_ring.full(0), 0);
  const unsigned slab = slabs + warpgroup * SLAB_BYTES;
  requantize(sums, slab, by, [](int place) { return place; });
  fence_async_proxy();
  warpgroup_barrier(warpgroup);
  if (threadIdx.x % 128 == 0 && channel0 + part.m < p.o) {
    wait_for_previous_launch();
    tma_store(out_map, channel0 + part.m, (int)pixel0 + part.n, slab);
    tma_store_commit();
    tma_store_wait();
  }
#else
  asm volatile("bar.sync 3, %0;" ::"n"(CONSUMERS) : "memory");  // all stages have been read
  reduce_split_k(sums, part, reinterpret_cast<int*>(shared), p, pixel0, channel0, bias,
                 multiplier, residual, residual_multiplier, residual_signed, out);
#endif
}
