// The kernel over the pipeline of gather.cuh:
// 1. A producer warp loads K tiles into a ring of stages.
// 2. Consumer warpgroups multiply them and add up in registers.
// 3. Epilogue in the warpgroup's slab: the residual, which TMA loads during the products, and TMA
//    stores, which end during the next tile's products; the first stages of that tile are loaded by
//    then.
// With TILE_PARTS > 1 the CTAs of a cluster divide K (split-K), add their sums and write the outputs
// from registers: hopper/cluster_split_k.cuh.
//
// The including file defines mainloop(sums, ring, state, a, b, count, overlapped), which multiplies
// `count` K tiles. With split-K there may be none. `overlapped` is called once, while products are
// in flight.
#pragma once
#include "bytes/hopper/gather.cuh"
#include "hopper/uniform.cuh"

#if TILE_PARTS > 1
#include "hopper/cluster_split_k.cuh"
#define IN_CLUSTER __cluster_dims__(1, TILE_PARTS, 1)

// A thread's outputs of a block, 16 channels of each warp by eight pixels: four adjacent channels
// of a pixel. Sums are of two channels of two pixels, which are transposed as pairs of bytes.
struct BlockOutputs {
  size_t at;
  bool valid;
  unsigned residual;

  // Loads the residual, zeros if it is null.
  __device__ __forceinline__ void load(const Part& part, const ConvShape& p, const Tile& tile,
                                       int block, const unsigned char* from) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int channel = tile.channel0 + part.m + warp * 16 + lane % 4 * 4;
    const unsigned pixel = tile.pixel0 + part.n + 8 * block + lane / 4;
    const unsigned pixels = block < GROUP_N / 8 ? (unsigned)p.n * p.oh * p.ow : 0;
    at = (size_t)pixel * p.o + channel;
    valid = pixel < pixels && channel < p.o;
    residual = from && valid ? *reinterpret_cast<const unsigned*>(from + at) : 0;
  }

  // Finishes the sums and writes them.
  template <typename T>
  __device__ __forceinline__ void write(const T (&sums)[4], const Finishing& by,
                                        unsigned char* out) const {
    const unsigned bytes = transposed(finish_four(sums, transposed(residual), by));
    if (valid) *reinterpret_cast<unsigned*>(out + at) = bytes;
  }
};
#else
#define IN_CLUSTER
#endif

// Grid: x, the CTAs that are resident at once, or one per tile if there are fewer or if K is split;
// y, the splits of K, one cluster. `residual` may be null; its descriptor is then unused. Producers
// release registers, and consumers acquire them; 0: neither.
template <int PRODUCER_REGISTERS, int CONSUMER_REGISTERS>
__device__ __forceinline__ void convolve(const TensorMap& x, const TensorMap& weight,
                                         const TensorMap& residual_map, const TensorMap& out_map,
                                         const Factors& factors, const unsigned char* residual,
                                         unsigned char* out, const ConvShape& p, int tiles,
                                         int k_tiles) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* shared = aligned_shared(dynamic);
  const unsigned stages = shared_address(shared);
  const unsigned slabs = stages + TILE_STAGES * STAGE_BYTES;
  constexpr int SLABS_BYTES = TILE_PARTS == 1 ? WARPGROUPS * SLAB_BYTES : 0;
  const Ring ring{slabs + SLABS_BYTES, TILE_STAGES, CONSUMERS / 32};
  const Ring slab_ring{ring.end(), 1, WARPGROUPS};
  const int first = (int)blockIdx.y * k_tiles / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * k_tiles / TILE_PARTS;

#if TILE_PARTS > 1
  using Split = SplitK<GROUP_N / 8>;
  const Arrivals arrivals = Split::arrivals_at(slab_ring.end());
  begin_block(x, weight, residual_map, out_map, ring, slab_ring, arrivals);
  cluster_arrive_relaxed();  // others may send to this CTA
#else
  begin_block(x, weight, residual_map, out_map, ring, slab_ring);
#endif

  const int warpgroup = warpgroup_index();
  if (warpgroup == WARPGROUPS) {
    release_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x / 32 == CONSUMERS / 32 && elect_one()) {
      produce(x, weight, residual_map, p, ring, slab_ring, stages, slabs, tiles, first, last,
              TILE_PARTS == 1 && residual);
    }
#if TILE_PARTS > 1
    __syncwarp();
    cluster_wait();  // who arrives at a barrier also waits for it
#endif
    return;
  }
  acquire_registers<CONSUMER_REGISTERS>();

  const Part part = part_of(warpgroup);
  const unsigned a = stages + part.m * TILE_K, b = stages + BYTES_A + part.n * TILE_K;
  RingState state;
  Sums sums;
#if TILE_PARTS == 1
  const unsigned slab = slabs + warpgroup * SLAB_BYTES;
  const bool storing = threadIdx.x % 128 == 0;  // the thread that stores the warpgroup's outputs
  unsigned slab_phase = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x, slab_phase ^= 1) {
    const Tile at = tile_at(index, p);
    const bool again = index >= (int)gridDim.x;
    const int channel = at.channel0 + part.m;
    const Finishing by(p, factors, channel);
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
  const Tile at = tile_at(blockIdx.x, p);
  const Finishing by(p, factors, at.channel0 + part.m);
  BlockOutputs outputs[Split::OWN];
  wait_for_previous_launch();
#pragma unroll
  for (int i = 0; i < Split::OWN; ++i) outputs[i].load(part, p, at, Split::first() + i, residual);
  mainloop(sums, ring, state, a, b, last - first, [] {});
  using Sum = decltype(sums[0] + 0);  // NVRTC takes no generic lambda
  Split::reduce(sums, shared + (arrivals.end() - stages), arrivals,
                [&](int i, const Sum(&four)[4]) { outputs[i].write(four, by, out); });
#endif
}
