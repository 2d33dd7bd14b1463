// Split-K within a cluster: each CTA accumulates its share of K, then the cluster adds them.
// 1. Every CTA sends its accumulators, straight from registers, to the CTAs that add them up. It
//    keeps those that it adds up itself.
// 2. Each CTA adds to its own what the others have sent, in the order of their ranks, and writes
//    the outputs.
//
// A block is four accumulators of each thread, which `wgmma` computes from eight rows of B. A CTA
// adds up some blocks of all warpgroups, and the thread that adds up a sum is the one that has it
// in every CTA.
//
// The including file defines CONSUMERS, TILE_PARTS and `shared_address`. The CTAs of a cluster are
// along blockIdx.y, which is a CTA's rank.
#pragma once
#include "hopper/cluster_send.cuh"
#include "mma/transposed_matrices.cuh"

static_assert(TILE_PARTS <= 8, "clusters of a portable size");

template <typename T>
struct alignas(16) Four {
  T at[4];
};

// For BLOCKS blocks of each warpgroup.
template <int BLOCKS>
struct SplitK {
  // Blocks of a warpgroup that a CTA adds up; the last CTAs may have fewer, or none.
  static constexpr int OWN = (BLOCKS + TILE_PARTS - 1) / TILE_PARTS;
  static constexpr int BLOCK_BYTES = CONSUMERS * sizeof(Four<float>);  // of all warpgroups
  static constexpr int SENT_BYTES = OWN * BLOCK_BYTES;  // by one CTA to another, at most

  // The first block that this CTA adds up.
  static __device__ __forceinline__ int first() { return (int)blockIdx.y * OWN; }

  // The mbarrier of the sums that this CTA receives.
  static __device__ __forceinline__ Arrivals arrivals_at(unsigned mbarrier) {
    const int blocks = min(max(BLOCKS - first(), 0), OWN);
    return {mbarrier, (TILE_PARTS - 1) * blocks * BLOCK_BYTES};
  }

  // Adds up the sums, and calls `write(i, four)` for each of OWN blocks from `first` on, also for
  // those past the last. All consumer threads. `received`: [TILE_PARTS - 1][OWN] blocks of shared
  // memory that nothing else uses.
  template <typename T, typename Write>
  static __device__ __forceinline__ void reduce(const T (&sums)[4 * BLOCKS],
                                                const unsigned char* received,
                                                const Arrivals& arrivals, const Write& write) {
    const int rank = blockIdx.y;
    received += threadIdx.x * sizeof(Four<float>);
    Four<T> own[OWN] = {};
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
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int part = 0; part < TILE_PARTS; ++part) {  // in turn: each receives at a limited rate
        if (part * OWN + i >= BLOCKS) break;
        const T* first = sums + 4 * (part * OWN + i);
        const Four<T> block{{first[0], first[1], first[2], first[3]}};
        if (part == rank) {
          own[i] = block;
        } else {
          cluster_send(at[part] + i * BLOCK_BYTES, block.at, mbarriers[part]);
        }
      }
    }
    arrivals.wait();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int from = 0; from < TILE_PARTS - 1; ++from) {
        const Four<T> sent =
            *reinterpret_cast<const Four<T>*>(received + from * SENT_BYTES + i * BLOCK_BYTES);
#pragma unroll
        for (int v = 0; v < 4; ++v) own[i].at[v] += sent.at[v];
      }
      write(i, own[i].at);
    }
  }
};
