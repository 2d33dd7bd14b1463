// Parts of K, each a block of a cluster's, and how their sums of a tile become one.
//
// A thread has four sums of each of the tile's eights: of eight pixels, or of eight channels. A block
// adds up a share of the eights and writes it. The others hand it theirs, out of their registers into
// its shared memory, where its stages were; it adds them up in the order of the parts.
//
// The including file has, besides TILE_*, `Sums` of a thread and its `Group`, with
//   channel(eight, i), pixel(eight, i): where in the tile the i-th of its four sums of an eight lies.
#pragma once
#include "cluster.cuh"
#include "wgmma_pipeline.cuh"

constexpr int EIGHTS = sizeof(Sums) / (4 * sizeof(float));
constexpr int SHARE = (EIGHTS + TILE_PARTS - 1) / TILE_PARTS;  // eights that a block adds up
constexpr int PLACES_BYTES = MULTIPLIERS * 16;                 // of all threads, of an eight

static_assert(TILE_PARTS * SHARE * PLACES_BYTES <= TILE_STAGES * STAGE_BYTES,
              "sums come to where the tiles were");

// Those that this block adds up; none where the parts are more than the eights.
__device__ __forceinline__ int eights_of_block() {
  return max(min(SHARE, EIGHTS - (int)blockIdx.y * SHARE), 0);
}

// Ends its only phase when all that comes to this block has come.
struct Gate {
  unsigned at;
  __device__ __forceinline__ void init() const { barrier_init(at, 1); }
  __device__ __forceinline__ void expect_all() const {
    barrier_arrive_expecting(at, TILE_PARTS * eights_of_block() * PLACES_BYTES);
  }
};

// Where a part's sums of an eight of the share lie, from `base`; the thread's own.
__device__ __forceinline__ unsigned place_of(unsigned base, int part, int eight) {
  return base + (part * SHARE + eight) * PLACES_BYTES + threadIdx.x * 16;
}

// Hands all sums to those that add them up, to `base` of their shared memory. All blocks have met
// since they last read there.
__device__ __forceinline__ void hand_over(const Sums& sums, unsigned base, const Gate& gate) {
#pragma unroll
  for (int rank = 0; rank < TILE_PARTS; ++rank) {
    const unsigned there = cluster_address(base, rank), gate_there = cluster_address(gate.at, rank);
#pragma unroll
    for (int e = 0; e < SHARE && rank * SHARE + e < EIGHTS; ++e) {
      cluster_send(place_of(there, blockIdx.y, e), gate_there, &sums[4 * (rank * SHARE + e)]);
    }
  }
}

// Adds up the block's share, and ends and writes it. Bias and residual are there before the sums.
template <typename Group>
__device__ __forceinline__ void write_share(const Group& group, unsigned base, const Gate& gate,
                                            const ConvShape& p, unsigned pixel0, int channel0,
                                            const float* bias, const STORAGE* residual,
                                            STORAGE* out) {
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const int first = (int)blockIdx.y * SHARE, count = eights_of_block();
  if (count == 0) return;
  const auto channel = [&](int e, int i) { return channel0 + group.channel(first + e, i); };
  const auto pixel = [&](int e, int i) { return pixel0 + group.pixel(first + e, i); };
  // Places in memory, of less than 2³¹ elements: the same steps lead from eight to eight, and from the
  // first of the four sums to its neighbours.
  const auto place = [&](int e, int i) { return pixel(e, i) * (unsigned)p.o + channel(e, i); };
  const unsigned start = place(0, 0), eight = place(1, 0) - start;
  const unsigned steps[4] = {0, place(0, 1) - start, place(0, 2) - start, place(0, 3) - start};
  unsigned outputs = 0;  // a bit for each sum
#pragma unroll
  for (int n = 0; n < 4 * SHARE; ++n) {
    const bool is = n / 4 < count && channel(n / 4, n % 4) < p.o && pixel(n / 4, n % 4) < pixels;
    outputs |= is << n;
  }
  const auto at = [&](int n) { return start + n / 4 * eight + steps[n % 4]; };
  float held[4 * SHARE] = {};  // zeros where there is no bias: a pointer that may be null would keep
                               // the array in memory, not in registers
  STORAGE added[4 * SHARE];
  if (bias) {
#pragma unroll
    for (int n = 0; n < 4 * SHARE; ++n) {
      if (outputs >> n & 1) held[n] = bias[channel(n / 4, n % 4)];
    }
  }
  if (residual) {
#pragma unroll
    for (int n = 0; n < 4 * SHARE; ++n) {
      if (outputs >> n & 1) added[n] = residual[at(n)];
    }
  }
  barrier_wait_for_cluster(gate.at, 0);
  float4 sums[SHARE];
#pragma unroll
  for (int e = 0; e < SHARE; ++e) {
    float4 part[TILE_PARTS];  // all asked for before the first is needed
#pragma unroll
    for (int i = 0; i < TILE_PARTS; ++i) part[i] = shared_load(place_of(base, i, e));
    sums[e] = part[0];
#pragma unroll
    for (int i = 1; i < TILE_PARTS; ++i) {
      sums[e].x += part[i].x, sums[e].y += part[i].y;
      sums[e].z += part[i].z, sums[e].w += part[i].w;
    }
  }
#pragma unroll
  for (int n = 0; n < 4 * SHARE; ++n) {
    if (!(outputs >> n & 1)) continue;
    const float4 four = sums[n / 4];
    const float sum = n % 4 == 0 ? four.x : n % 4 == 1 ? four.y : n % 4 == 2 ? four.z : four.w;
    out[at(n)] = epilogue<STORAGE>(p, sum, n, n, held, residual ? added : nullptr);
  }
}
