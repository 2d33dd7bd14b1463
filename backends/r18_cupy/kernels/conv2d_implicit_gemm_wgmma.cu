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
#include "wgmma_conv.cuh"

constexpr int BYTES_A = TILE_M * ROW_BYTES, BYTES_B = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = BYTES_A + BYTES_B;
constexpr int SHARE = (TILE_N + TILE_PARTS - 1) / TILE_PARTS;  // pixels that a block writes

static_assert(TILE_N * PITCH * sizeof(float) <= TILE_STAGES * STAGE_BYTES,
              "the sums are laid down where the tiles were");

// The tiles [first, last) of K, one after the other into the stages. One thread. Weights of the
// first tiles are on their way before the launch before this one has ended.
__device__ __forceinline__ void feed(const TensorMap& pixels, const TensorMap& weights,
                                     const ConvShape& p, const Ring& ring, unsigned tiles,
                                     unsigned pixel0, int channel0, int first, int last) {
  const unsigned column = pixel0 % p.ow, line = pixel0 / p.ow;
  const WindowCorner corner{(int)column * p.sw - p.pw, (int)(line % p.oh) * p.sh - p.ph,
                            (int)(line / p.oh)};
  const int runs = (p.c + TILE_K - 1) / TILE_K;  // of channels, at each position of the window
  int run = first % runs, s = first / runs % p.kw, r = first / runs / p.kw;
  const auto begin = [&](int k, int stage) {
    barrier_arrive_expecting(ring.full(stage), STAGE_BYTES);
    copy_box(tiles + stage * STAGE_BYTES, weights, ring.full(stage), k * TILE_K, channel0);
  };
  for (int i = 0; i < TILE_STAGES && first + i < last; ++i) begin(first + i, i);
  wait_for_launch_before();
  Turn turn;
  for (int k = first; k < last; ++k, turn.advance(TILE_STAGES)) {
    if (k - first >= TILE_STAGES) {
      barrier_wait(ring.empty(turn.stage), turn.parity ^ 1);
      begin(k, turn.stage);
    }
    copy_pixels(tiles + turn.stage * STAGE_BYTES + BYTES_A, pixels, ring.full(turn.stage),
                run * TILE_K, corner, r, s);
    if (++run == runs) {
      run = 0;
      if (++s == p.kw) s = 0, ++r;
    }
  }
}

// The warpgroup's sums over `count` tiles of K.
__device__ __forceinline__ void multiply_all(float (&sums)[GROUP_N / 2], const Ring& ring,
                                             unsigned a, unsigned b, int count) {
  const bool speaks = threadIdx.x % 32 == 0;  // of its warp
  Turn turn;
  int before = 0;  // the stage of the tile before
  for (int k = 0; k < count; ++k, turn.advance(TILE_STAGES)) {
    barrier_wait(ring.full(turn.stage), turn.parity);
    multiply(sums, a + turn.stage * STAGE_BYTES, b + turn.stage * STAGE_BYTES);
    wgmma_wait<1>();  // all but these products have read their stage
    if (k > 0 && speaks) barrier_arrive(ring.empty(before));
    before = turn.stage;
  }
  wgmma_wait<0>();
}

// A chunk of the tile's sums, added up over the parts of K.
__device__ __forceinline__ void add_up(float (&sum)[CHUNK], const float* chunk, int swap) {
  float4 value[CHUNK / 4];
#pragma unroll
  for (int q = 0; q < CHUNK / 4; ++q) {
    const unsigned quad = shared_address(swapped_quad(chunk, q, swap));
    float4 part[TILE_PARTS];  // all asked for before the first is needed
#pragma unroll
    for (int i = 0; i < TILE_PARTS; ++i) part[i] = cluster_load(cluster_address(quad, i));
    value[q] = part[0];
#pragma unroll
    for (int i = 1; i < TILE_PARTS; ++i) {
      value[q].x += part[i].x, value[q].y += part[i].y;
      value[q].z += part[i].z, value[q].w += part[i].w;
    }
  }
  unswap(sum, value, swap);
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
  unsigned char* shared = aligned_stages(dynamic);
  const unsigned tiles = shared_address(shared);
  const Ring ring{tiles + TILE_STAGES * STAGE_BYTES};
  const unsigned pixels = (unsigned)p.n * p.oh * p.ow;
  const unsigned channel_tiles = (p.o + TILE_M - 1) / TILE_M;
  const unsigned pixel0 = blockIdx.x / channel_tiles * TILE_N;
  const int channel0 = blockIdx.x % channel_tiles * TILE_M;
  const int first = (int)blockIdx.y * k_tiles / TILE_PARTS;
  const int last = ((int)blockIdx.y + 1) * k_tiles / TILE_PARTS;

  let_next_launch_begin();
  if (threadIdx.x == 0) {
    ring.init(TILE_STAGES);
    barrier_init_done();
  }
  __syncthreads();

  float* tile = reinterpret_cast<float*>(shared);
  if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x == MULTIPLIERS) {
      feed(x, weight, p, ring, tiles, pixel0, channel0, first, last);
    }
    __syncwarp();
  } else {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int m = warpgroup / TILE_GROUPS_N * 64, n = warpgroup % TILE_GROUPS_N * GROUP_N;
    float sums[GROUP_N / 2] = {};
    multiply_all(sums, ring, tiles + m * ROW_BYTES, tiles + BYTES_A + n * ROW_BYTES, last - first);
    multipliers_barrier();  // all have done with the stages, which the sums overwrite
    lay_down(sums, tile + (n + lane % 4 * 2) * PITCH + m + warp * 16 + lane / 4);
    if constexpr (TILE_PARTS == 1) multipliers_barrier();
  }
  if constexpr (TILE_PARTS > 1) cluster_barrier();
  if (threadIdx.x < MULTIPLIERS) {
    wait_for_launch_before();
    const int share = TILE_PARTS == 1 ? 0 : (int)blockIdx.y * SHARE;
    const int end = min(min(share + SHARE, TILE_N), (int)(pixels - pixel0));
    const auto pixel_at = [&](int place) { return (int)pixel0 + place; };
    if constexpr (TILE_PARTS == 1) {
      write_out(p, tile, channel0, share, end, bias, residual, out, pixel_at, own_sums);
    } else {
      write_out(p, tile, channel0, share, end, bias, residual, out, pixel_at, add_up);
    }
  }
  if constexpr (TILE_PARTS > 1) cluster_barrier();  // nobody leaves while its sums are read
}
