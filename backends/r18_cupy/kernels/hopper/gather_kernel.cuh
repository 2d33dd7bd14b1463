// The kernel that gathers pixels of an implicit matrix, see wgmma_gather.cuh: one tile a block. The
// including file defines what a warpgroup does of it before, a `Group` of (tiles, warpgroup), which has
//   multiply_all(ring, count): the products of so many tiles of K; whose turn is next;
//   add_bias(p, bias, channel0), add_slab(slab, at): a slab of the residual lies at an address;
//   fill_slabs(tiles, relu): the sums as they are stored, slab after slab;
// and of parts of K what wgmma_parts.cuh asks for.
#pragma once
#include "hopper/gather.cuh"

#if TILE_PARTS > 1
#define IN_CLUSTER __cluster_dims__(1, TILE_PARTS, 1)
#else
#define IN_CLUSTER
#endif

// Grid: x, tiles of pixels and, innermost, of channels; y, the parts of K, a cluster.
// `residual` may be null; its map then says nothing. It is not __restrict__: what the launch before
// still writes must not be read ahead of the wait.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS) IN_CLUSTER
conv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                           const __grid_constant__ TensorMap weight,
                           const __grid_constant__ TensorMap residual_map,
                           const __grid_constant__ TensorMap out_map,
                           const float* __restrict__ bias,
                           const STORAGE* residual, STORAGE* __restrict__ out,
                           const ConvShape p, const int k_tiles) {
  const Maps maps{x, weight, residual_map, out_map};
  extern __shared__ unsigned char dynamic[];
  unsigned char* shared = aligned_stages(dynamic);
  const unsigned tiles = shared_address(shared);
  const Ring ring{tiles + TILE_STAGES * STAGE_BYTES, TILE_STAGES};
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const unsigned pixel0 = blockIdx.x / channel_tiles * TILE_N;
  const int channel0 = blockIdx.x % channel_tiles * TILE_M;
  const int first = (int)blockIdx.y * k_tiles / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * k_tiles / TILE_PARTS;
  const int slabs = TILE_PARTS == 1 && residual ? SLABS : 0;

  expect(weight, x, out_map, residual_map);
  begin(ring);

  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (warpgroup == WARPGROUPS) {
    if (lane == 0) feed(maps, p, ring, tiles, pixel0, channel0, first, last, slabs);
  } else {
    Group group(tiles, warpgroup);
    Turn turn = group.multiply_all(ring, last - first);
#if TILE_PARTS == 1
    if (bias) group.add_bias(p, bias, channel0);
    for (int slab = 0; slab < slabs; ++slab, turn.advance(TILE_STAGES)) {
      barrier_wait(ring.full(turn.stage), turn.parity);
      group.add_slab(slab, tiles + turn.stage * STAGE_BYTES + BYTES_A);
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty(turn.stage));
    }
    multipliers_barrier();  // all have done with the stages, which the outputs overwrite
    group.fill_slabs(tiles, p.relu);
    async_fence();
    multipliers_barrier();
    if (threadIdx.x == 0) {
      wait_for_launch_before();
      for (int slab = 0; slab < SLABS; ++slab) {
        const int channel = channel0 + slab * SLAB_CHANNELS;
        if (channel < p.o) store_box(maps.out, channel, (int)pixel0, tiles + slab * BYTES_B);
      }
      store_commit();
      store_wait();
    }
#else
    multipliers_barrier();  // all have done with the stages, which the sums overwrite
    end_parts(group, reinterpret_cast<float*>(shared), p, pixel0, channel0, bias, residual, out);
#endif
  }
}
