// Split-K within a cluster: each CTA accumulates its share of K, then the cluster adds them.
// 1. Every CTA sends its accumulators, straight from registers, to the CTAs that add them up. Those
//    that it adds up itself it keeps.
// 2. Each CTA adds to its own what the others have sent, in the order of their ranks, applies the
//    epilogue and writes the outputs. Bias and residual have been loaded by then.
//
// A block is four accumulators of each thread, which `wgmma` computes from eight rows of B. A CTA
// adds up some blocks of all warpgroups, and the thread that adds up a sum is the one that has it
// in every CTA.
//
// Included by gather_kernel.cuh, before which `WarpgroupTile` is defined. Of its members:
// - BLOCKS: blocks of a warpgroup; accumulators.main[4 * i] is the first sum of block i.
// - Outputs: a thread's outputs of a block. load(tile, p, pixel0, channel0, block, bias, residual)
//   loads what is added to the sums; write(p, sums, out) finishes and writes them.
// - LOADS_EARLY: whether there are registers to load that before the first product.
#pragma once
#include "hopper/cluster_send.cuh"
#include "hopper/pipeline.cuh"

constexpr int BLOCKS = WarpgroupTile::BLOCKS;
// Blocks of a warpgroup that a CTA adds up; the last CTAs may have fewer, or none.
constexpr int OWN_BLOCKS = (BLOCKS + TILE_PARTS - 1) / TILE_PARTS;
constexpr int BLOCK_BYTES = CONSUMERS * sizeof(float4);  // [thread], of all warpgroups
constexpr int SENT_BYTES = OWN_BLOCKS * BLOCK_BYTES;     // by one CTA to another, at most

static_assert(TILE_PARTS <= 8, "clusters of a portable size");

// The mbarrier of the sums that this CTA receives.
__device__ __forceinline__ Arrivals arrivals_at(unsigned mbarrier) {
  const int blocks = min(max(BLOCKS - (int)blockIdx.y * OWN_BLOCKS, 0), OWN_BLOCKS);
  return {mbarrier, (TILE_PARTS - 1) * blocks * BLOCK_BYTES};
}

using OwnOutputs = WarpgroupTile::Outputs[OWN_BLOCKS];

// Loads what is added to the sums.
__device__ __forceinline__ void load_added(OwnOutputs& outputs, const WarpgroupTile& tile,
                                           const ConvShape& p, unsigned pixel0, int channel0,
                                           const float* bias, const STORAGE* residual) {
  wait_for_previous_launch();
#pragma unroll
  for (int i = 0; i < OWN_BLOCKS; ++i) {
    const int block = (int)blockIdx.y * OWN_BLOCKS + i;
    outputs[i].load(tile, p, pixel0, channel0, block, bias, residual);
  }
}

// Adds up and writes the outputs. All consumer threads. `received`: [TILE_PARTS - 1][OWN_BLOCKS]
// blocks of shared memory, which nothing else uses.
__device__ __forceinline__ void reduce_split_k(const WarpgroupTile& tile,
                                               const OwnOutputs& outputs, const ConvShape& p,
                                               STORAGE* out, const unsigned char* received,
                                               const Arrivals& arrivals) {
  const int rank = blockIdx.y;
  received += threadIdx.x * sizeof(float4);
  float4 own[OWN_BLOCKS] = {};
  __syncwarp();
  cluster_wait();  // all CTAs have initialised their mbarriers
  unsigned mbarriers[TILE_PARTS], at[TILE_PARTS];
#pragma unroll
  for (int part = 0; part < TILE_PARTS; ++part) {
    const int from = rank < part ? rank : rank - 1;  // among the CTAs that send to it
    mbarriers[part] = cluster_address(arrivals.mbarrier, part);
    at[part] = cluster_address(shared_address(received) + from * SENT_BYTES, part);
  }
#pragma unroll
  for (int i = 0; i < OWN_BLOCKS; ++i) {
#pragma unroll
    for (int part = 0; part < TILE_PARTS; ++part) {  // in turn: each receives at a limited rate
      if (part * OWN_BLOCKS + i >= BLOCKS) break;
      const float* first = tile.accumulators.main + 4 * (part * OWN_BLOCKS + i);
      const float4 block{first[0], first[1], first[2], first[3]};
      if (part == rank) {
        own[i] = block;
      } else {
        cluster_send(at[part] + i * BLOCK_BYTES, block, mbarriers[part]);
      }
    }
  }
  arrivals.wait();
#pragma unroll
  for (int i = 0; i < OWN_BLOCKS; ++i) {  // blocks past the last have outputs that are not written
    float4 sum = own[i];
#pragma unroll
    for (int from = 0; from < TILE_PARTS - 1; ++from) {
      const float4 part =
          *reinterpret_cast<const float4*>(received + from * SENT_BYTES + i * BLOCK_BYTES);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    outputs[i].write(p, sum, out);
  }
}
