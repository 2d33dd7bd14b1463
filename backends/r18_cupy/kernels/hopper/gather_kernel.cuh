// The kernel over the pipeline of gather.cuh, one tile per CTA:
// 1. The producer thread loads K tiles by TMA.
// 2. The consumer warpgroups multiply them and accumulate in registers.
// 3. Epilogue: bias, residual and ReLU, then the output slabs are stored by TMA; with split-K the
//    CTAs of the cluster first add their accumulators (cluster_split_k.cuh).
//
// The including file defines `WarpgroupTile`, a warpgroup's share of the tile, constructed from
// (tiles, warpgroup):
// - mainloop(pipeline, count): multiplies `count` K tiles; returns the state of the next stage.
// - add_bias(p, bias, channel0), add_residual_slab(slab, address).
// - fill_slabs(tiles, relu): writes the outputs to shared memory, one slab after the other.
// For split-K:
// - BLOCKS: blocks of a warpgroup; accumulators.main[4 * i] is the first sum of block i.
// - Outputs: a thread's outputs of a block. load(tile, p, pixel0, channel0, block, bias, residual)
//   loads what is added to the sums; write(p, sums, out) finishes and writes them.
// - LOADS_EARLY: whether there are registers to load that before the first product.
#pragma once
#include "hopper/gather.cuh"
#include "hopper/uniform.cuh"

#if TILE_PARTS > 1
#include "hopper/cluster_split_k.cuh"
#define IN_CLUSTER __cluster_dims__(1, TILE_PARTS, 1)
#else
#define IN_CLUSTER
#endif

// A CTA's tile of outputs, of `k_tiles` K tiles. `pixels_from(pixel0, first)`: their pixels from
// the tile `first` on, for the producer. NOTE: `residual`, which may be null, is not __restrict__,
// or the compiler could read what the previous launch still writes ahead of the wait.
template <typename PixelsFrom>
__device__ __forceinline__ void compute_tile(const TensorMaps& maps, const PixelsFrom& pixels_from,
                                             const float* bias, const STORAGE* residual,
                                             STORAGE* out, const ConvShape& p, int k_tiles) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* shared = aligned_stages(dynamic);
  const unsigned tiles = shared_address(shared);
  const Pipeline pipeline{tiles + TILE_STAGES * STAGE_BYTES, TILE_STAGES};
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const unsigned pixel0 = blockIdx.x / channel_tiles * TILE_N;
  const int channel0 = blockIdx.x % channel_tiles * TILE_M;
  const int first = (int)blockIdx.y * k_tiles / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * k_tiles / TILE_PARTS;
  const int slabs = TILE_PARTS == 1 && residual ? SLABS : 0;

  prefetch_tensor_maps(maps.weights, maps.pixels, maps.out, maps.second);
#if TILE_PARTS > 1
  using Split = SplitK<WarpgroupTile::BLOCKS>;
  const Arrivals arrivals = Split::arrivals_at(pipeline.end());
  begin_block(pipeline, arrivals);
  cluster_arrive_relaxed();  // others may send to this CTA
#else
  begin_block(pipeline);
#endif

  const int warpgroup = warpgroup_index();
  if (warpgroup == WARPGROUPS) {
    release_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 == CONSUMERS / 32 && elect_one()) {
      produce(maps, pixels_from(pixel0, first), pipeline, tiles, pixel0, channel0, first, last,
              slabs);
    }
#if TILE_PARTS > 1
    __syncwarp();
    cluster_wait();  // who arrives at a barrier also waits for it
#endif
  } else {
    acquire_registers<CONSUMER_REGISTERS>();
    WarpgroupTile warpgroup_tile(tiles, warpgroup);
#if TILE_PARTS > 1
    typename WarpgroupTile::Outputs outputs[Split::OWN];
    const auto load_added = [&] {
      wait_for_previous_launch();
#pragma unroll
      for (int i = 0; i < Split::OWN; ++i) {
        const int block = Split::first() + i;
        outputs[i].load(warpgroup_tile, p, pixel0, channel0, block, bias, residual);
      }
    };
    if constexpr (WarpgroupTile::LOADS_EARLY) load_added();
#endif
    PipelineState state = warpgroup_tile.mainloop(pipeline, last - first);
#if TILE_PARTS == 1
    if (bias) warpgroup_tile.add_bias(p, bias, channel0);
    for (int slab = 0; slab < slabs; ++slab, state.advance(TILE_STAGES)) {
      mbarrier_wait(pipeline.full(state.stage), state.phase);
      warpgroup_tile.add_residual_slab(slab, tiles + state.stage * STAGE_BYTES + BYTES_A);
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.empty(state.stage));
    }
    consumers_barrier();  // all stages have been read; the outputs overwrite them
    warpgroup_tile.fill_slabs(tiles, p.relu);
    fence_async_proxy();
    consumers_barrier();
    if (threadIdx.x == 0) {
      wait_for_previous_launch();
      for (int slab = 0; slab < SLABS; ++slab) {
        const int channel = channel0 + slab * SLAB_CHANNELS;
        if (channel < p.o) tma_store(maps.out, channel, (int)pixel0, tiles + slab * BYTES_B);
      }
      tma_store_commit();
      tma_store_wait();
    }
#else
    if constexpr (!WarpgroupTile::LOADS_EARLY) load_added();
    Split::reduce(warpgroup_tile.accumulators.main, shared + (arrivals.end() - tiles), arrivals,
                  [&](int i, const float (&sums)[4]) { outputs[i].write(p, sums, out); });
#endif
  }
}

// Both kernels: grid x, tiles of pixels and, innermost, of channels; y, the splits of K, one
// cluster.
#ifdef PROJECTION
// The first `own_tiles` of the `k_tiles` K tiles are of `x`, the others of `z`.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS) IN_CLUSTER
conv2d_projection_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                                      const __grid_constant__ TensorMap z,
                                      const __grid_constant__ TensorMap weight,
                                      const __grid_constant__ TensorMap out_map,
                                      const float* __restrict__ bias, STORAGE* __restrict__ out,
                                      const ConvShape p, const ConvShape projection,
                                      const int k_tiles, const int own_tiles) {
  compute_tile(
      {x, z, weight, out_map},
      [&](unsigned pixel0, int first) {
        return ProjectedPixelTiles(x, p, own_tiles, z, projection, pixel0, first);
      },
      bias, nullptr, out, p, k_tiles);
}
#else
// `residual` may be null; its descriptor is then unused.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS) IN_CLUSTER
conv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                           const __grid_constant__ TensorMap weight,
                           const __grid_constant__ TensorMap residual_map,
                           const __grid_constant__ TensorMap out_map,
                           const float* __restrict__ bias,
                           const STORAGE* residual, STORAGE* __restrict__ out,
                           const ConvShape p, const int k_tiles) {
  compute_tile({x, residual_map, weight, out_map},
               [&](unsigned pixel0, int first) { return PixelTiles(x, p, pixel0, first); },
               bias, residual, out, p, k_tiles);
}
#endif
