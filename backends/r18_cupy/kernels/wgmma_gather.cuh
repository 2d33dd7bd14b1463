// What the kernels share that gather pixels of an implicit matrix: a block computes a tile of
// channels and pixels, whichever matrix is which.
//
// K runs over the window's positions, and at each over the channels, 128 bytes of them at a time;
// weights come packed the same way, [O][depth]. TMA copies a tile of weights and one of pixels,
// which it gathers from the image itself, into the next free stage.
//
// Where a problem has too few tiles to fill a GPU, K is divided among the blocks of a cluster. Each
// keeps its sums in shared memory; then each adds up a share of the tile's pixels from all of them,
// in their order.
#pragma once
#include "cluster.cuh"
#include "vector.cuh"
#include "wgmma_pipeline.cuh"

constexpr int BYTES_A = TILE_M * ROW_BYTES, BYTES_B = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;

static_assert(SLABS * BYTES_B <= TILE_STAGES * STAGE_BYTES, "outputs leave where the tiles were");

// What TMA is told of.
struct Maps {
  const TensorMap &pixels, &weights, &residual, &out;
};

// The tiles [first, last) of K, one after the other into the stages, then the residual's slabs. One
// thread. Weights of the first tiles are on their way before the launch before this one has ended.
__device__ __forceinline__ void feed(const Maps& maps, const ConvShape& p, const Ring& ring,
                                     unsigned tiles, unsigned pixel0, int channel0, int first,
                                     int last, int slabs) {
  const unsigned column = pixel0 % p.ow, line = pixel0 / p.ow;
  const WindowCorner corner{(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph,
                            (int)(line / p.oh)};
  const int runs = (p.c + TILE_K - 1) / TILE_K;  // of channels, at each position of the window
  int run = first % runs, s = first / runs % p.kw, r = first / runs / p.kw;
  const auto feed_weights = [&](int k, int stage) {
    barrier_arrive_expecting(ring.full(stage), STAGE_BYTES);
    copy_box(tiles + stage * STAGE_BYTES, maps.weights, ring.full(stage), k * TILE_K, channel0);
  };
  for (int i = 0; i < TILE_STAGES && first + i < last; ++i) feed_weights(first + i, i);
  wait_for_launch_before();
  Turn turn;
  for (int k = first; k < last; ++k, turn.advance(TILE_STAGES)) {
    if (k - first >= TILE_STAGES) {
      barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
      feed_weights(k, turn.stage);
    }
    copy_pixels(tiles + turn.stage * STAGE_BYTES + BYTES_A, maps.pixels, ring.full(turn.stage),
                run * TILE_K, corner, r, s);
    if (++run == runs) {
      run = 0;
      if (++s == p.kw) s = 0, ++r;
    }
  }
  for (int slab = 0; slab < slabs; ++slab, turn.advance(TILE_STAGES)) {
    barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);  // passes while nothing has been there
    barrier_arrive_expecting(ring.full(turn.stage), BYTES_B);
    copy_box(tiles + turn.stage * STAGE_BYTES + BYTES_A, maps.residual, ring.full(turn.stage),
             channel0 + slab * SLAB_CHANNELS, (int)pixel0);
  }
}

#if TILE_PARTS > 1
// -- parts of K -----------------------------------------------------------------------------------

constexpr int CHUNK = WIDTH<STORAGE>;  // channels that a thread writes at once
// Four channels of padding: a warp's sums, of 8 channels of every second pixel, lie in 32 banks.
constexpr int PITCH = TILE_M + 4;
constexpr int GROUPS = TILE_M / CHUNK;          // chunks of a pixel's channels
constexpr int ROWS_OUT = MULTIPLIERS / GROUPS;  // pixels that the block writes at once
constexpr int SHARE = (TILE_N + TILE_PARTS - 1) / TILE_PARTS;  // pixels that a block writes

static_assert(TILE_N * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the sums are laid down where the tiles were");
static_assert(MULTIPLIERS % GROUPS == 0, "a thread writes the same channels of each pixel");

using Chunk = Run<STORAGE, CHUNK>;

// A chunk of the tile's sums, added up over the parts of K.
__device__ __forceinline__ void add_up(float (&sum)[CHUNK], const float* chunk) {
#pragma unroll
  for (int q = 0; q < CHUNK / 4; ++q) {
    const unsigned quad = shared_address(chunk + 4 * q);
    float4 part[TILE_PARTS];  // all asked for before the first is needed
#pragma unroll
    for (int i = 0; i < TILE_PARTS; ++i) part[i] = cluster_load(cluster_address(quad, i));
    float4 value = part[0];
#pragma unroll
    for (int i = 1; i < TILE_PARTS; ++i) {
      value.x += part[i].x, value.y += part[i].y, value.z += part[i].z, value.w += part[i].w;
    }
    sum[4 * q] = value.x, sum[4 * q + 1] = value.y;
    sum[4 * q + 2] = value.z, sum[4 * q + 3] = value.w;
  }
}

// Epilogue and store of the pixels [first, last) of the tile: a thread takes CHUNK channels of
// every ROWS_OUT-th.
__device__ __forceinline__ void write_share(const ConvShape& p, const float* tile,
                                            unsigned pixel0, int channel0, int first, int last,
                                            const float* bias, const STORAGE* residual,
                                            STORAGE* out) {
  const int group = threadIdx.x % GROUPS, channel = channel0 + group * CHUNK;
  if (channel >= p.o) return;
  float held[CHUNK];  // an absent bias is a zero here: a pointer that may be null would keep the
                      // array in memory, not in registers
#pragma unroll
  for (int v = 0; v < CHUNK; ++v) held[v] = bias ? bias[channel + v] : 0.0f;
#pragma unroll 1
  for (int row = first + threadIdx.x / GROUPS; row < last; row += ROWS_OUT) {
    const size_t at = (size_t)(pixel0 + row) * p.o + channel;
    Chunk added, result;
    if (residual) added = *reinterpret_cast<const Chunk*>(residual + at);
    float sum[CHUNK];
    add_up(sum, tile + row * PITCH + group * CHUNK);
#pragma unroll
    for (int v = 0; v < CHUNK; ++v) {
      result.at[v] = epilogue<STORAGE>(p, sum[v], v, v, held, residual ? added.at : nullptr);
    }
    *reinterpret_cast<Chunk*>(out + at) = result;
  }
}
#endif
