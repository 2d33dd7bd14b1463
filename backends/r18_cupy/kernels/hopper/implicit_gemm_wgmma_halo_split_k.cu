// Implicit GEMM on Hopper for stride 1 and few tiles: the input tile and its halo resident in shared
// memory, and K divided among the CTAs of a cluster. NHWC; fp16, bf16, tf32.
//
// A cluster computes one tile of whole output rows by 64 channels (halo.cuh). K is the sequence of
// (chunk of channels, window position); each CTA takes a part of it:
// 1. The producer thread loads the weights of its positions through a ring of stages, and the image
//    rows of its chunks, each into a slot of its own. A pixel is loaded once per chunk, where the
//    gathering kernel loads it for each position.
// 2. One consumer warpgroup multiplies.
// 3. The CTAs add their accumulators and write the outputs (cluster_split_k.cuh).
//
// Constraints: sm_90a; stride 1; C and O multiples of 16 bytes; the image rows of a part's chunks
// in shared memory, see `obstacle` in hopper/implicit_gemm_wgmma_halo_split_k.py.
#include "hopper/halo.cuh"
#include "hopper/cluster_split_k.cuh"

static_assert(!SPLITS, "the compiler would serialise the products of split image rows");
static_assert(TILE_PARTS > 1, "without parts, implicit_gemm_wgmma_halo.cu has the shorter epilogue");

// The warpgroup's accumulators, transposed to [output pixel][channel].
struct WarpgroupTile {
  const RowOf<true> row_of;
  Accumulators accumulators;

  __device__ __forceinline__ void store_accumulators(float* tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Accumulator& acc = accumulators.main;
    tile += warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < GROUP_N / 8; ++j) {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        float* const pixel = tile + row_of(8 * j + lane % 4 * 2 + v) * PITCH;
        pixel[0] = acc[4 * j + v], pixel[8] = acc[4 * j + 2 + v];
      }
    }
  }
};

// Grid: x, images, row tiles and, innermost, channel tiles; y, the parts of K, one cluster.
// `residual` may be null. NOTE: it is not __restrict__, or the compiler could read what the previous
// launch still writes ahead of the wait.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
__cluster_dims__(1, TILE_PARTS, 1)
conv2d_implicit_gemm_wgmma_halo_split_k(const __grid_constant__ TensorMap x,
                                        const __grid_constant__ TensorMap weight,
                                        const float* __restrict__ bias, const STORAGE* residual,
                                        STORAGE* __restrict__ out, const ConvShape p,
                                        const HaloShape shape) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* const shared = aligned_stages(dynamic);
  const unsigned slots = shared_address(shared);
  const unsigned stages = slots + shape.slots_nbytes;
  const Pipeline pipeline{stages + TILE_STAGES * STAGE_BYTES, TILE_STAGES};  // of weights
  const Pipeline slot_pipeline{pipeline.end(), shape.slots};
  const Tile at = tile_at(blockIdx.x, p, shape.rows);
  const int chunks = (p.c + TILE_K - 1) / TILE_K, positions = p.kh * p.kw;
  const int first = (int)blockIdx.y * chunks * positions / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * chunks * positions / TILE_PARTS;
  const int chunk0 = first / positions, position0 = first % positions;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  prefetch_tensor_maps(weight, x);
  begin_block(pipeline, slot_pipeline);

  if (warp == CONSUMERS / 32) {
    if (lane == 0) {
      PipelineState state;
      int chunk = chunk0, position = position0;
      const auto load_weights = [&] {
        mbarrier_arrive_expect_tx(pipeline.full(state.stage), STAGE_BYTES);
        tma_load(stages + state.stage * STAGE_BYTES, weight, pipeline.full(state.stage),
                 (position * chunks + chunk) * TILE_K, at.channel0);
        state.advance(TILE_STAGES);
        if (++position == positions) position = 0, ++chunk;
      };
      // The weights of the first stages are loaded before the previous launch has ended.
      const int ahead = min(last, first + TILE_STAGES);
      for (int i = first; i < ahead; ++i) load_weights();
      wait_for_previous_launch();
      for (int i = chunk0; first < last && i * positions < last; ++i) {
        const unsigned full = slot_pipeline.full(i - chunk0);
        mbarrier_arrive_expect_tx(full, shape.patch_nbytes);
        tma_load_patch(slots + (i - chunk0) * shape.slot_pitch, x, full, i * TILE_K, -p.pw,
                       at.line0 - p.ph, at.image);
      }
      for (int i = ahead; i < last; ++i) {
        mbarrier_wait(pipeline.empty(state.stage), state.phase ^ 1);
        load_weights();
      }
    }
    return;
  }

  const bool elected = lane == 0;
  // Recompute rows for each pixel: keeping them would spill registers.
  int per_place = shape.per_place;
  asm volatile("" : "+r"(per_place));
  WarpgroupTile warpgroup_tile{RowOf<true>{p, shape, per_place}};
  PipelineState state;
  int before = 0;               // the stage of the previous position
  int r = position0 / p.kw, s = position0 % p.kw;
  int slot = -1;                // of the present chunk
  unsigned pixels = slots;
  for (int i = first; i < last; ++i, state.advance(TILE_STAGES)) {
    if (i == first || r + s == 0) {
      ++slot;
      pixels = slots + slot * shape.slot_pitch;
      mbarrier_wait(slot_pipeline.full(slot), 0);
    }
    mbarrier_wait(pipeline.full(state.stage), state.phase);
    multiply(warpgroup_tile.accumulators, stages + state.stage * STAGE_BYTES,
             pixels + (r * shape.padded + s) * ROW_BYTES);
    wgmma_commit();
    wgmma_wait<1>();  // all but these products have read their stage
    if (elected && i > first) mbarrier_arrive(pipeline.empty(before));
    before = state.stage;
    if (++s == p.kw) {
      s = 0;
      if (++r == p.kh) r = 0;
    }
  }
  wgmma_wait<0>();
  consumers_barrier();  // all stages have been read; the accumulators overwrite them

  // The tile's outputs are adjacent pixels of one image. The reduction takes them as the last ones
  // of a problem that ends there.
  const unsigned pixel0 = ((unsigned)at.image * p.oh + at.line0) * p.ow;
  ConvShape until = p;
  until.n = until.oh = 1;
  until.ow = (int)pixel0 + min(shape.rows, p.oh - at.line0) * p.ow;
  reduce_split_k(warpgroup_tile, reinterpret_cast<float*>(shared + shape.slots_nbytes), until,
                 pixel0, at.channel0, bias, residual, out);
}
