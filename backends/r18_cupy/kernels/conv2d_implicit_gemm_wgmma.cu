// Convolution as a matrix product on Hopper's tensor cores. NHWC.
//
// Rows of A are output channels, rows of B output pixels: so the sums of a tile of few channels,
// which the first layers are, still come from instructions that read many pixels. K runs over the
// window's positions, and at each over the channels, 128 bytes of them at a time; weights come
// packed the same way, [O][depth].
//
// One warp feeds: TMA copies a tile of weights and one of pixels, which it gathers from the image
// itself, into the next free stage. The others, in warpgroups, multiply what has arrived. `full`
// and `empty` barriers, a pair a stage, pass the stages on.
//
// Where a problem has too few tiles to fill a GPU, K is divided among the blocks of a cluster. Each
// keeps its sums in shared memory; then each adds up a share of the tile's pixels from all of them,
// in their order.
#include "async_copy.cuh"
#include "cluster.cuh"
#include "conv.cuh"
#include "dependent_launch.cuh"
#include "tensor_copy.cuh"
#include "vector.cuh"
#include "wgmma.cuh"

constexpr int CHUNK = WIDTH<STORAGE>;  // channels that a thread writes at once
constexpr int ROW_BYTES = 128;         // of K in a tile
constexpr int STEPS = ROW_BYTES / 32;  // of a tile
constexpr int WARPGROUPS = TILE_GROUPS_M * TILE_GROUPS_N;
constexpr int MULTIPLIERS = 128 * WARPGROUPS;  // threads
constexpr int THREADS = MULTIPLIERS + 32;
constexpr int GROUP_N = TILE_N / TILE_GROUPS_N;  // pixels of a warpgroup
constexpr int BYTES_A = TILE_M * ROW_BYTES, BYTES_B = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;
// Four channels of padding: a warp's sums, of 8 channels of every second pixel, lie in 32 banks.
constexpr int PITCH = TILE_M + 4;
constexpr int GROUPS = TILE_M / CHUNK;          // chunks of a pixel's channels
constexpr int ROWS_OUT = MULTIPLIERS / GROUPS;  // pixels that the block writes at once
constexpr int SHARE = (TILE_N + TILE_PARTS - 1) / TILE_PARTS;  // pixels that a block writes
constexpr int BATCH = 4;  // chunks of the residual that a thread asks for at once

static_assert(TILE_K * sizeof(STORAGE) == ROW_BYTES, "a row of a tile is 128 bytes");
static_assert(TILE_M == 64 * TILE_GROUPS_M, "a warpgroup multiplies 64 channels");
static_assert(TILE_N % TILE_GROUPS_N == 0 && GROUP_N % 8 == 0, "a matrix begins at 1024 bytes");
static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");
static_assert(MULTIPLIERS % GROUPS == 0, "a thread writes the same channels of each pixel");
static_assert(TILE_N * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the sums are laid down where the tiles were");

// Barrier of the multiplying threads alone.
__device__ __forceinline__ void multipliers_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
}

// Which stage, and the parity of the phase in which it is used.
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == TILE_STAGES) stage = 0, parity ^= 1;
  }
};

struct Barriers {
  unsigned first;
  __device__ __forceinline__ unsigned full(int stage) const { return first + 16 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return first + 16 * stage + 8; }
};

// The tiles [first, last) of K, one after the other into the stages. One thread. Weights of the
// first tiles are on their way before the launch before this one has ended.
__device__ __forceinline__ void feed(const TensorMap& pixels, const TensorMap& weights,
                                     const ConvShape& p, const Barriers& barriers, unsigned tiles,
                                     unsigned pixel0, int channel0, int first, int last) {
  const unsigned column = pixel0 % p.ow, line = pixel0 / p.ow;
  const WindowCorner corner{(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph,
                            (int)(line / p.oh)};
  const int runs = (p.c + TILE_K - 1) / TILE_K;  // of channels, at each position of the window
  int run = first % runs, s = first / runs % p.kw, r = first / runs / p.kw;
  const auto begin = [&](int k, int stage) {
    barrier_arrive_expecting(barriers.full(stage), STAGE_BYTES);
    copy_box(tiles + stage * STAGE_BYTES, weights, barriers.full(stage), k * TILE_K, channel0);
  };
  for (int i = 0; i < TILE_STAGES && first + i < last; ++i) begin(first + i, i);
  wait_for_launch_before();
  Turn turn;
  for (int k = first; k < last; ++k, turn.advance()) {
    if (k - first >= TILE_STAGES) {
      barrier_wait(barriers.empty(turn.stage), turn.parity ^ 1);
      begin(k, turn.stage);
    }
    copy_pixels(tiles + turn.stage * STAGE_BYTES + BYTES_A, pixels, barriers.full(turn.stage),
                run * TILE_K, corner, r, s);
    if (++run == runs) {
      run = 0;
      if (++s == p.kw) s = 0, ++r;
    }
  }
}

// The warpgroup's sums over `count` tiles of K.
__device__ __forceinline__ void multiply(float (&sums)[GROUP_N / 2], const Barriers& barriers,
                                         unsigned a, unsigned b, int count) {
  const bool speaks = threadIdx.x % 32 == 0;  // of its warp
  Turn turn;
  int before = 0;  // the stage of the tile before
  for (int k = 0; k < count; ++k, turn.advance()) {
    barrier_wait(barriers.full(turn.stage), turn.parity);
    const unsigned long long left = matrix_descriptor(a + turn.stage * STAGE_BYTES);
    const unsigned long long right = matrix_descriptor(b + turn.stage * STAGE_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      wgmma<STORAGE, GROUP_N>(sums, left + step * STEP_OF_K, right + step * STEP_OF_K);
    }
    wgmma_commit();
    wgmma_wait<1>();  // all but these have read their stage
    if (k > 0 && speaks) barrier_arrive(barriers.empty(before));
    before = turn.stage;
  }
  wgmma_wait<0>();
}

// From registers to shared memory, [TILE_N][PITCH]: transposed, so that a pixel's channels lie
// side by side. `at` is the lane's first pixel and channel.
__device__ __forceinline__ void lay_down(const float (&sums)[GROUP_N / 2], float* at) {
#pragma unroll
  for (int j = 0; j < GROUP_N / 8; ++j) {
    float* pixel = at + 8 * j * PITCH;
    pixel[0] = sums[4 * j], pixel[PITCH] = sums[4 * j + 1];
    pixel[8] = sums[4 * j + 2], pixel[PITCH + 8] = sums[4 * j + 3];
  }
}

// A chunk of the tile's sums, added up over the parts of K. Lanes take a chunk's halves in an order
// of their own, so that eight lanes read from 32 banks.
__device__ __forceinline__ void add_up(float (&sum)[CHUNK], const float* chunk, int swap) {
  constexpr int QUADS = CHUNK / 4;
  float4 value[QUADS];
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    const float* quad = chunk + 4 * (QUADS == 2 ? q ^ swap : q);
    if constexpr (TILE_PARTS == 1) {
      value[q] = *reinterpret_cast<const float4*>(quad);
    } else {
      float4 part[TILE_PARTS];  // all asked for before the first is needed
#pragma unroll
      for (int i = 0; i < TILE_PARTS; ++i) {
        part[i] = cluster_load(cluster_address(shared_address(quad), i));
      }
      value[q] = part[0];
#pragma unroll
      for (int i = 1; i < TILE_PARTS; ++i) {
        value[q].x += part[i].x, value[q].y += part[i].y;
        value[q].z += part[i].z, value[q].w += part[i].w;
      }
    }
  }
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    const float4 quad = QUADS == 2 && swap ? value[QUADS - 1 - q] : value[q];
    sum[4 * q] = quad.x, sum[4 * q + 1] = quad.y, sum[4 * q + 2] = quad.z, sum[4 * q + 3] = quad.w;
  }
}

using Chunk = Run<STORAGE, CHUNK>;

// Epilogue and store of the pixels [first, last) of the tile: a thread takes CHUNK channels of
// every ROWS_OUT-th pixel.
__device__ __forceinline__ void write_out(const ConvShape& p, const float* tile, unsigned pixel0,
                                          int channel0, int first, int last, const float* bias,
                                          const STORAGE* residual, STORAGE* out) {
  const int group = threadIdx.x % GROUPS, channel = channel0 + group * CHUNK;
  if (channel >= p.o) return;
  const int swap = (group ^ group >> 2) & 1;
  float held[CHUNK];  // an absent bias is a zero here: a pointer that may be null would keep the
                      // array in memory, not in registers
#pragma unroll
  for (int v = 0; v < CHUNK; ++v) held[v] = bias ? bias[channel + v] : 0.0f;
#pragma unroll 1
  for (int row0 = first + threadIdx.x / GROUPS; row0 < last; row0 += BATCH * ROWS_OUT) {
    Chunk added[BATCH];  // all loaded before the first is needed: one wait for a batch
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int row = row0 + j * ROWS_OUT;
      if (residual && row < last) {
        added[j] =
            *reinterpret_cast<const Chunk*>(residual + (size_t)(pixel0 + row) * p.o + channel);
      }
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int row = row0 + j * ROWS_OUT;
      if (row >= last) break;
      float sum[CHUNK];
      add_up(sum, tile + row * PITCH + group * CHUNK, swap);
      Chunk result;
#pragma unroll
      for (int v = 0; v < CHUNK; ++v) {
        result.at[v] =
            epilogue<STORAGE>(p, sum[v], v, v, held, residual ? added[j].at : nullptr);
      }
      *reinterpret_cast<Chunk*>(out + (size_t)(pixel0 + row) * p.o + channel) = result;
    }
  }
}

// Grid: x, tiles of pixels and, innermost, of channels; y, the parts of K, a cluster.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
#if TILE_PARTS > 1
    __cluster_dims__(1, TILE_PARTS, 1)
#endif
    conv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                               const __grid_constant__ TensorMap weight,
                               const float* __restrict__ bias,
                               const STORAGE* __restrict__ residual, STORAGE* __restrict__ out,
                               const ConvShape p, const int k_tiles) {
  extern __shared__ unsigned char dynamic[];
  // The host asks for 1024 bytes more than the stages and the barriers need.
  unsigned char* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  const unsigned tiles = shared_address(shared);
  const Barriers barriers{tiles + TILE_STAGES * STAGE_BYTES};
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const unsigned pixel0 = blockIdx.x / channel_tiles * TILE_N;
  const int channel0 = blockIdx.x % channel_tiles * TILE_M;
  const int first = (int)blockIdx.y * k_tiles / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * k_tiles / TILE_PARTS;

  let_next_launch_begin();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < TILE_STAGES; ++stage) {
      barrier_init(barriers.full(stage), 1);
      barrier_init(barriers.empty(stage), MULTIPLIERS / 32);
    }
    barrier_init_done();
  }
  __syncthreads();

  float* tile = reinterpret_cast<float*>(shared);
  if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x == MULTIPLIERS) {
      feed(x, weight, p, barriers, tiles, pixel0, channel0, first, last);
    }
    __syncwarp();
  } else {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int m = warpgroup / TILE_GROUPS_N * 64, n = warpgroup % TILE_GROUPS_N * GROUP_N;
    float sums[GROUP_N / 2] = {};
    multiply(sums, barriers, tiles + m * ROW_BYTES, tiles + BYTES_A + n * ROW_BYTES, last - first);
    multipliers_barrier();  // all have done with the stages, which the sums overwrite
    lay_down(sums, tile + (n + lane % 4 * 2) * PITCH + m + warp * 16 + lane / 4);
    if constexpr (TILE_PARTS == 1) multipliers_barrier();
  }
  if constexpr (TILE_PARTS > 1) cluster_barrier();
  if (threadIdx.x < MULTIPLIERS) {
    wait_for_launch_before();
    const int share = TILE_PARTS == 1 ? 0 : (int)blockIdx.y * SHARE;
    const int end = min(min(share + SHARE, TILE_N), (int)(pixels - pixel0));
    write_out(p, tile, pixel0, channel0, share, end, bias, residual, out);
  }
  if constexpr (TILE_PARTS > 1) cluster_barrier();  // nobody leaves while its sums are read
}
