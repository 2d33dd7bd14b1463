// Convolution as a matrix product on Hopper's tensor cores. NHWC.
//
// K runs over the window's positions, and at each over the channels, 128 bytes of them at a time;
// weights come packed the same way, [O][depth]. TMA copies a tile of weights and one of pixels,
// which it gathers from the image itself, into the next free stage.
//
// Where a problem has too few tiles to fill a GPU, K is divided among the blocks of a cluster. Each
// keeps its sums in shared memory; then each adds up a share of the tile's pixels from all of them,
// in their order.
#include "cluster.cuh"
#include "vector.cuh"
#include "wgmma_conv.cuh"

constexpr int BYTES_A = TILE_M * ROW_BYTES, BYTES_B = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;

static_assert(SLABS * BYTES_B <= TILE_STAGES * STAGE_BYTES, "outputs leave where the tiles were");

// What TMA is told of.
struct Maps {
  const TensorMap &pixels, &weights, &residual;
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

// Tiles of K that are split, and then multiplied, together: two where one warpgroup does both, for
// which one has more waiting than work.
constexpr int RUN = SPLITS && WARPGROUPS == 1 && TILE_STAGES >= 6 ? 2 : 1;

static_assert(TILE_STAGES % RUN == 0, "the stages of a run lie side by side");

// The products of a warpgroup, whose rows of a tile of K begin at `a` and `b` in its stage.
struct Multiplier {
  const Ring& ring;
  const unsigned tiles, a, b;
  Products products;
  Turn turn;
  int before = -1;  // the first stage of the run before

  // Of LENGTH tiles, which lie side by side. Pixels are split while the products of the run before
  // are under way.
  template <int LENGTH>
  __device__ __forceinline__ void multiply_run() {
    const int first = turn.stage;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i, turn.advance(TILE_STAGES)) {
      barrier_wait(ring.full(first + i), turn.parity);
    }
    if constexpr (SPLITS) split_run<LENGTH>(first);
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) {
      multiply(products, a + (first + i) * STAGE_BYTES, b + (first + i) * STAGE_BYTES);
    }
    wgmma_commit();
    wgmma_wait<1>();  // all but these products have read their stages
    free_run<RUN>();
    before = first;
  }

  // Makes factors of the pixels in stages side by side.
  template <int LENGTH>
  __device__ __forceinline__ void split_run(int stage) {
    constexpr int WARPS = MULTIPLIERS / 32, PASSES = TILE_N / 8 / WARPS;  // over a stage
    constexpr int ALL = LENGTH * PASSES, MOST = ALL < 2 * RUN ? ALL : 2 * RUN;
    static_assert(TILE_N % (8 * WARPS) == 0 && ALL % MOST == 0, "warps split as many rows each");
    const unsigned pixels = tiles + BYTES_A + stage * STAGE_BYTES + threadIdx.x / 32 * 8 * ROW_BYTES;
#pragma unroll
    for (int done = 0; done < ALL; done += MOST) {
      const auto rows_at = [&](int i) {
        const int pass = done + i;
        return pixels + pass / PASSES * STAGE_BYTES + pass % PASSES * WARPS * 8 * ROW_BYTES;
      };
      split_eights<MOST>(rows_at, MOST);
    }
    factors_made();
  }

  template <int LENGTH>
  __device__ __forceinline__ void free_run() {
    const bool speaks = threadIdx.x % 32 == 0;  // of its warp
    if (before < 0 || !speaks) return;
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) barrier_arrive(ring.empty(before + i));
  }

  __device__ __forceinline__ void multiply_all(int count) {
    for (int k = 0; k < count / RUN; ++k) multiply_run<RUN>();
    if (count % RUN) multiply_run<1>();
    wgmma_wait<0>();
    if (count % RUN) {
      free_run<1>();
    } else {
      free_run<RUN>();
    }
  }
};

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

// From registers to shared memory, [TILE_N][PITCH]: transposed, so that a pixel's channels lie
// side by side. `at` is the lane's first pixel and channel.
__device__ __forceinline__ void lay_down(const Sums& sums, float* at) {
#pragma unroll
  for (int j = 0; j < GROUP_N / 8; ++j) {
    float* pixel = at + 8 * j * PITCH;
    pixel[0] = sums[4 * j], pixel[PITCH] = sums[4 * j + 1];
    pixel[8] = sums[4 * j + 2], pixel[PITCH + 8] = sums[4 * j + 3];
  }
}

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

// Grid: x, tiles of pixels and, innermost, of channels; y, the parts of K, a cluster. `residual` may
// be null; `residual_map` then says nothing.
extern "C" __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
#if TILE_PARTS > 1
    __cluster_dims__(1, TILE_PARTS, 1)
#endif
    conv2d_implicit_gemm_wgmma(const __grid_constant__ TensorMap x,
                               const __grid_constant__ TensorMap weight,
                               const __grid_constant__ TensorMap residual_map,
                               const __grid_constant__ TensorMap out_map,
                               const float* __restrict__ bias,
                               const STORAGE* __restrict__ residual, STORAGE* __restrict__ out,
                               const ConvShape p, const int k_tiles) {
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

  begin(ring);

  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int m = warpgroup / TILE_GROUPS_N, n = warpgroup % TILE_GROUPS_N * GROUP_N;
  if (warpgroup == WARPGROUPS) {
    if (lane == 0) {
      const Maps maps{x, weight, residual_map};
      feed(maps, p, ring, tiles, pixel0, channel0, first, last, slabs);
    }
    __syncwarp();
  } else {
    Multiplier multiplier{ring, tiles, tiles + m * 64 * ROW_BYTES,
                          tiles + BYTES_A + n * ROW_BYTES};
    multiplier.multiply_all(last - first);
    Sums& sums = multiplier.products.total();
#if TILE_PARTS == 1
    Turn turn = multiplier.turn;
    if (bias) add_bias(sums, p, bias, channel0 + m * 64);
    const auto row_of = [](int place) { return place; };
    for (int slab = 0; slab < slabs; ++slab, turn.advance(TILE_STAGES)) {
      barrier_wait(ring.full(turn.stage), turn.parity);
      // A slab holds the channels of a warpgroup, or of two of its warps.
      if (slab == m * SLABS_GROUP + warp * SLABS_GROUP / 4) {
        const unsigned at = tiles + turn.stage * STAGE_BYTES + BYTES_A + n * ROW_BYTES;
        add_residual(sums, at, 0, row_of);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.empty(turn.stage));
    }
    multipliers_barrier();  // all have done with the stages, which the outputs overwrite
    fill_slabs(sums, tiles + m * SLABS_GROUP * BYTES_B + n * ROW_BYTES, BYTES_B, row_of, p.relu);
    async_fence();
    multipliers_barrier();
    if (threadIdx.x == 0) {
      wait_for_launch_before();
      for (int slab = 0; slab < SLABS; ++slab) {
        const int channel = channel0 + slab * SLAB_CHANNELS;
        if (channel < p.o) store_box(out_map, channel, (int)pixel0, tiles + slab * BYTES_B);
      }
      store_commit();
      store_wait();
    }
#else
    multipliers_barrier();  // all have done with the stages, which the sums overwrite
    float* tile = reinterpret_cast<float*>(shared);
    lay_down(sums, tile + (n + lane % 4 * 2) * PITCH + m * 64 + warp * 16 + lane / 4);
#endif
  }
#if TILE_PARTS > 1
  cluster_barrier();
  if (warpgroup < WARPGROUPS) {
    wait_for_launch_before();
    const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
    const int share = (int)blockIdx.y * SHARE;
    const int end = min(min(share + SHARE, TILE_N), (int)(pixels - pixel0));
    write_share(p, reinterpret_cast<const float*>(shared), pixel0, channel0, share, end, bias,
                residual, out);
  }
  cluster_barrier();  // nobody leaves while its sums are read
#endif
}
