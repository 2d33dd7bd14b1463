// Winograd F(4×4, 3×3) in one launch: neither transformed tiles nor products cross the L2. NCHW,
// float32.
//
// A persistent CTA computes TILE_M output channels of TILE_N output tiles at a time, a part. The
// sums of all 36 positions stay in registers: 36 · 32 · 32 floats are more than half of an SM's.
// 1. Producers: a warp has one of the step's TILE_K input channels, a lane one tile. It loads the
//    6 × 6 pixels, transforms them in registers and writes 36 values to the step's stage. The
//    step's filters, transformed and packed by the host, arrive by one bulk copy.
// 2. Multipliers: a warp multiplies three of the 36 positions. Each half of it has one position to
//    itself, so a lane sums 8 channels × 8 tiles with 16 operands; the third is shared by both
//    halves, 8 × 4 sums with 12 operands. Whole warps for each position, with 8 × 4 sums a lane,
//    would read a quarter more of shared memory.
// 3. Epilogue, in rounds: a thread writes its sums of TILE_UNITS of its 8 channels to shared
//    memory, where the positions meet. A lane then transforms one tile of one channel back, applies
//    bias, residual and ReLU, and writes four rows. Producers are at the next part.
//
// Registers: producers release theirs, or 96 sums and 28 operands would not fit.
//
// WIDTH: pixels that are loaded and stored at a time. Input rows from the second column of a tile
// on and output rows are aligned to as many, and end at a multiple.
//
// Constraints: sm_90a; stride 1, windows of 3×3.
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "conv/swapped_columns.cuh"
#include "conv/winograd.cuh"
#include "hopper/bulk.cuh"
#include "hopper/wgmma.cuh"

constexpr int OUTPUT = 4, EXTENT = OUTPUT + 2, POSITIONS = EXTENT * EXTENT;
constexpr int QUAD = 4;               // sums or operands that are read or written at once
constexpr int WARPS = POSITIONS / 3;  // of multipliers
constexpr int MULTIPLIERS = 32 * WARPS, PRODUCERS = 32 * TILE_K;
constexpr int CHANNELS = QUAD * TILE_UNITS;  // of a round of the epilogue
constexpr int ROUNDS = (2 * QUAD + TILE_UNITS - 1) / TILE_UNITS;
constexpr int ROW_BYTES = TILE_N * sizeof(float);  // of channels or tiles in shared memory
constexpr int FILTER_BYTES = POSITIONS * TILE_K * TILE_M * sizeof(float);

// Registers per thread (setmaxnreg): 128 at launch.
constexpr int PRODUCER_REGISTERS = 104, MULTIPLIER_REGISTERS = 136;
static_assert(MULTIPLIERS * MULTIPLIER_REGISTERS + PRODUCERS * PRODUCER_REGISTERS <= 65536,
              "multipliers acquire what producers release");
static_assert(TILE_M == 32 && TILE_N == 32, "16 lanes have 8 x 8 sums each");
static_assert(TILE_K == 4, "a warpgroup of producers, a warp per channel");
static_assert(CHANNELS <= WARPS, "a warp has at most one channel of a round");
static_assert(TILE_STAGES >= 2, "one stage is filled while another is multiplied");
static_assert(WIDTH == 1 || WIDTH == 2 || WIDTH == 4, "pixels come in vectors");

// How a problem is divided; the host's `PARTS` in hopper/winograd_one_launch.py mirrors it field by
// field. Tiles are counted over all images, row by row. Consecutive parts have the same tiles.
struct WinogradParts {
  int rows, columns;  // of tiles in an image
  int tiles;          // of the batch
  int blocks;         // of TILE_M output channels
  int steps;          // of TILE_K input channels
  int parts;
};

struct Stage {
  float filters[POSITIONS][TILE_K][TILE_M];
  float pixels[POSITIONS][TILE_K][TILE_N];  // neighbouring tiles are swapped: see `multiply`
};
static_assert(sizeof(Stage::filters) == FILTER_BYTES, "one bulk copy");

struct Shared {
  Stage stages[TILE_STAGES];
  float sums[2][POSITIONS][CHANNELS][TILE_N];  // of two rounds; see `column_of`
  // `full` completes a phase when the filters and every producer warp's values have arrived,
  // `empty` when every multiplier warp has read them.
  unsigned long long full[TILE_STAGES], empty[TILE_STAGES];
};

// The stage that is next, and the parity of its phase.
struct StageState {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == TILE_STAGES) stage = 0, phase ^= 1;
  }
};

// Where a lane's tile is.
struct TilePlace {
  bool exists;
  int n, top, left;  // of its outputs
  __device__ __forceinline__ TilePlace(const WinogradParts& g, int part, int lane) {
    const unsigned tile = (unsigned)(part / g.blocks) * TILE_N + lane;
    exists = tile < (unsigned)g.tiles;
    const unsigned row = tile / g.columns;
    left = (tile - row * g.columns) * OUTPUT;
    n = row / g.rows;
    top = (row - n * g.rows) * OUTPUT;
  }
};

// Neighbouring pixels, accessed as one vector.
template <int COUNT>
struct alignas(COUNT * sizeof(float)) Pixels {
  float at[COUNT];
};

// -- producers ------------------------------------------------------------------------------------

// A lane's input tile in one channel after another.
struct InputTile {
  const float* next;        // first pixel, in the step's channel; may be outside of the image
  unsigned upper, lower;    // bit EXTENT · r + s: whether pixel (r, s) of three rows is inside
  int channel, w, plane;

  __device__ __forceinline__ InputTile(const float* x, const ConvShape& p, const TilePlace& at,
                                       int channel)
      : channel(channel), w(p.w), plane(p.h * p.w) {
    const int top = at.top - p.ph, left = at.left - p.pw;
    next = x + ((long long)(at.n * p.c + channel) * plane + (long long)top * w + left);
    unsigned columns = 0;
#pragma unroll
    for (int s = 0; s < EXTENT; ++s) columns |= (unsigned)(0 <= left + s && left + s < p.w) << s;
    if (!at.exists) columns = 0;
    upper = lower = 0;
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      const unsigned row = 0 <= top + r && top + r < p.h ? columns << r % 3 * EXTENT : 0;
      (r < 3 ? upper : lower) |= row;
    }
  }

  // Loads the pixels, zeros outside of the image, and moves on by a step. `d`: rows, columns.
  __device__ __forceinline__ void load(const ConvShape& p, float (&d)[EXTENT][EXTENT]) {
    const bool present = channel < p.c;
    const unsigned inside[2] = {present ? upper : 0, present ? lower : 0};
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      const float* const row = next + r * w;
      const auto is_inside = [&](int s) { return inside[r / 3] >> (r % 3 * EXTENT + s) & 1; };
      d[r][0] = is_inside(0) ? row[0] : 0.0f;
#pragma unroll
      for (int s = 1; s < 1 + OUTPUT; s += WIDTH) {
        Pixels<WIDTH> pixels = {};
        if (is_inside(s)) pixels = *reinterpret_cast<const Pixels<WIDTH>*>(row + s);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) d[r][s + i] = pixels.at[i];
      }
      d[r][EXTENT - 1] = is_inside(EXTENT - 1) ? row[EXTENT - 1] : 0.0f;
    }
    next += (long long)TILE_K * plane;
    channel += TILE_K;
  }
};

__device__ __forceinline__ void produce(Shared& shared, const float* x, const float* weight,
                                        const ConvShape& p, const WinogradParts& g) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  StageState state;
  for (int part = blockIdx.x; part < g.parts; part += gridDim.x) {
    InputTile tile(x, p, TilePlace(g, part, lane), warp);
    const char* filters = reinterpret_cast<const char*>(weight) +
                          (size_t)(part % g.blocks) * g.steps * FILTER_BYTES;
    float d[EXTENT][EXTENT];
    tile.load(p, d);
#pragma unroll 1
    for (int step = 0; step < g.steps; ++step, state.advance()) {
      float half[EXTENT][EXTENT];  // Bᵀ d, transposed
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) {
        float column[EXTENT];
#pragma unroll
        for (int r = 0; r < EXTENT; ++r) column[r] = d[r][s];
        Winograd<OUTPUT>::input(column, half[s]);
      }
      // The next step's pixels arrive while these are transformed and stored.
      if (step + 1 < g.steps) tile.load(p, d);
      // Each stage is empty at first: the wait is for the phase before the first, which is over.
      mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase ^ 1);
      Stage& stage = shared.stages[state.stage];
      const unsigned full = shared_address(&shared.full[state.stage]);
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(full, FILTER_BYTES);
        bulk_load(shared_address(stage.filters), filters, FILTER_BYTES, full);
      }
      __syncwarp();
      filters += FILTER_BYTES;
      float* const out = &stage.pixels[0][warp][swapped_column(lane)];
#pragma unroll
      for (int r = 0; r < EXTENT; ++r) {
        float row[EXTENT], v[EXTENT];
#pragma unroll
        for (int s = 0; s < EXTENT; ++s) row[s] = half[s][r];
        Winograd<OUTPUT>::input(row, v);
#pragma unroll
        for (int s = 0; s < EXTENT; ++s) out[(r * EXTENT + s) * TILE_K * TILE_N] = v[s];
      }
      __syncwarp();
      // NOTE: no `fence.proxy.async`, which would wait for the pixels above. The async proxy writes
      // filters only, and what is stored here is read with ordinary loads.
      if (lane == 0) mbarrier_arrive(full);
    }
  }
}

// -- multipliers ----------------------------------------------------------------------------------

// sum += channels times tiles. See `Accumulator::multiply` in conv/sgemm.cuh: sums are in vectors
// along the tiles, which are swapped pairwise in shared memory, so that a tile's operand and its
// sums are in different banks of registers; and each product shares an operand with the one before.
template <int TILES>
__device__ __forceinline__ void multiply(float (&sum)[2 * QUAD][TILES],
                                         const float (&left)[2 * QUAD],
                                         const float (&right)[TILES]) {
#pragma unroll
  for (int i = 0; i < 2 * QUAD; i += 2) {
#pragma unroll
    for (int q = 0; q < TILES; ++q) {
      const int j = i % 4 ? TILES - 1 - q : q;  // back and forth
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = i + (half ^ q % 2);
        sum[row][j] = fmaf(left[row], right[swapped_column(j)], sum[row][j]);
      }
    }
  }
}

__device__ __forceinline__ void load_quad(float* values, unsigned address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(address)
               : "memory");
}

// values[i] = row[i / 4 · 16 + i % 4]: quads that are half a row apart.
template <int COUNT>
__device__ __forceinline__ void load_quads(float (&values)[COUNT], unsigned row) {
#pragma unroll
  for (int i = 0; i < COUNT; i += QUAD) load_quad(values + i, row + i / QUAD * (ROW_BYTES / 2));
}

// Where a tile of a round's channel is in `Shared::sums`. Odd channels have their halves swapped:
// lanes that write two neighbouring channels at once then touch different banks.
__device__ __forceinline__ int column_of(int channel, int tile) {
  return tile ^ channel % 2 * (TILE_N / 2);
}

// A thread's sums. Channels and tiles i of `own`: 4 · channel_lane or 4 · tile_lane, plus
// i / 4 · 16 + i % 4. `common` has the same channels, and the tiles of its half of the warp:
// 16 · (lane / 16) + 4 · tile_lane + i.
struct Sums {
  float own[2 * QUAD][2 * QUAD];  // of the position of the lane's half of the warp
  float common[2 * QUAD][QUAD];   // of the position that the halves share
};

// A thread's place in a warp. NOTE: lanes that differ in bit 0 share tiles, in bit 1 channels. A
// 128-bit read of shared memory then takes two cycles instead of four, for both operands.
struct Lane {
  int warp, index, half, channel, tile;
  __device__ __forceinline__ Lane() {
    unsigned thread = threadIdx.x - PRODUCERS;
    // Keeps what follows from it out of registers while it is not needed.
    asm volatile("" : "+r"(thread));
    warp = thread / 32, index = thread % 32, half = index / 16;
    channel = index % 2 + index / 8 % 2 * 2;
    tile = index / 2 % 4;
  }
  __device__ __forceinline__ int own_position() const { return 3 * warp + half; }
  __device__ __forceinline__ int common_position() const { return 3 * warp + 2; }
};

// Sums a part's products over all steps.
__device__ __forceinline__ void multiply_steps(Sums& sums, const Shared& shared, StageState& state,
                                               int steps) {
  const Lane lane;
  float left[2 * QUAD], right[2 * QUAD];  // operands of `own`
  float common_left[2 * QUAD], common_right[QUAD];
  // Addresses in the first stage, and what leads from there to the input channel.
  const Stage& first = shared.stages[0];
  const int own = lane.own_position(), common = lane.common_position();
  const int channel = QUAD * lane.channel, tile = QUAD * lane.tile;
  const unsigned filters = shared_address(&first.filters[own][0][channel]);
  const unsigned pixels = shared_address(&first.pixels[own][0][tile]);
  const unsigned common_filters = shared_address(&first.filters[common][0][channel]);
  const unsigned common_pixels =
      shared_address(&first.pixels[common][0][tile + TILE_N / 2 * lane.half]);
  unsigned offset;
  const auto load_own = [&] {
    load_quads(left, filters + offset);
    load_quads(right, pixels + offset);
  };
  const auto load_common = [&] {
    load_quads(common_left, common_filters + offset);
    load_quads(common_right, common_pixels + offset);
  };
  const auto await_stage = [&] {
    mbarrier_wait(shared_address(&shared.full[state.stage]), state.phase);
    offset = state.stage * (unsigned)sizeof(Stage);
  };
#pragma unroll
  for (int i = 0; i < 2 * QUAD; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * QUAD; ++j) sums.own[i][j] = 0.0f;
#pragma unroll
    for (int j = 0; j < QUAD; ++j) sums.common[i][j] = 0.0f;
  }
  await_stage();
  load_own();
  for (int step = 1; step <= steps; ++step) {
    // One position's operands arrive while the other's are multiplied.
    // NOTE: not unrolled. Of more products at once the assembler changes the order, which takes
    // more registers than there are, and costs the operands that they share.
#pragma unroll 1
    for (int k = 1; k < TILE_K; ++k) {
      load_common();
      multiply(sums.own, left, right);
      offset += ROW_BYTES;
      load_own();
      multiply(sums.common, common_left, common_right);
    }
    load_common();
    multiply(sums.own, left, right);
    // The arrival comes after this stage's last reads.
    __syncwarp();
    if (lane.index == 0) mbarrier_arrive(shared_address(&shared.empty[state.stage]));
    state.advance();
    if (step < steps) {
      await_stage();
      load_own();
    }
    multiply(sums.common, common_left, common_right);
  }
}

// -- epilogue -------------------------------------------------------------------------------------

__device__ __forceinline__ void multipliers_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
}

// Writes the sums of a round: unit i / TILE_UNITS of a round is a thread's channel i.
__device__ __forceinline__ void write_sums(float (&to)[POSITIONS][CHANNELS][TILE_N],
                                           const Sums& sums, const Lane& lane, int round) {
#pragma unroll
  for (int unit = 0; unit < TILE_UNITS; ++unit) {
    const int i = round * TILE_UNITS + unit, channel = unit * QUAD + lane.channel;
    if (i >= 2 * QUAD) break;
    const auto write = [&](int position, int tile, const float* quad) {
      *reinterpret_cast<float4*>(&to[position][channel][column_of(channel, tile)]) =
          make_float4(quad[0], quad[1], quad[2], quad[3]);
    };
    const int tile = QUAD * lane.tile;
    write(lane.own_position(), tile, sums.own[i]);
    write(lane.own_position(), tile + TILE_N / 2, sums.own[i] + QUAD);
    write(lane.common_position(), tile + lane.half * (TILE_N / 2), sums.common[i]);
  }
}

// The part's channel that is `channel` in a round; TILE_M or more if the round has no such.
__device__ __forceinline__ int channel_of(int round, int channel) {
  const int i = round * TILE_UNITS + channel / QUAD;
  return channel / QUAD >= TILE_UNITS || i >= 2 * QUAD
             ? TILE_M
             : channel % QUAD * QUAD + i / QUAD * (TILE_M / 2) + i % QUAD;
}

// A lane's output tile in one channel after another: its place, and what the epilogue adds.
struct OutputTile {
  TilePlace at;
  int channel0;       // of the part
  int rows, columns;  // of the tile inside of the image; no rows of a channel that does not exist
  size_t first;       // element of the tile's first pixel
  float bias;
  float addends[OUTPUT][OUTPUT];  // of the residual

  __device__ __forceinline__ bool has(int i, int j) const { return i < rows && j < columns; }

  // Moves to a channel of the part. Loads bias and residual, or zeros, ahead of their use: their
  // latency is longer than the transform's.
  __device__ __forceinline__ void load(const ConvShape& p, int channel_of_part,
                                       const float* biases, const float* residual) {
    const int channel = channel0 + channel_of_part;
    const bool exists = at.exists && channel_of_part < TILE_M && channel < p.o;
    rows = exists ? p.oh - at.top : 0, columns = p.ow - at.left;
    first = (size_t)((at.n * p.o + channel) * p.oh + at.top) * p.ow + at.left;
    bias = biases && exists ? biases[channel] : 0.0f;
#pragma unroll
    for (int i = 0; i < OUTPUT; ++i) {
#pragma unroll
      for (int j = 0; j < OUTPUT; j += WIDTH) {
        Pixels<WIDTH> pixels = {};
        if (residual && has(i, j)) {
          pixels = *reinterpret_cast<const Pixels<WIDTH>*>(residual + first + i * p.ow + j);
        }
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) addends[i][j + k] = pixels.at[k];
      }
    }
  }

  // Transforms the sums back, applies the epilogue and writes the tile. `sums`: those of the tile
  // at position 0.
  __device__ __forceinline__ void write(const ConvShape& p, const float* sums, float* out) const {
    const float least = p.relu ? 0.0f : __int_as_float(0xff800000);  // -infinity
    float half[EXTENT][OUTPUT];  // Aᵀ m, transposed
#pragma unroll
    for (int s = 0; s < EXTENT; ++s) {
      float m[EXTENT];
#pragma unroll
      for (int r = 0; r < EXTENT; ++r) m[r] = sums[(r * EXTENT + s) * CHANNELS * TILE_N];
      Winograd<OUTPUT>::output(m, half[s]);
    }
#pragma unroll
    for (int i = 0; i < OUTPUT; ++i) {
      float m[EXTENT], row[OUTPUT];
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) m[s] = half[s][i];
      Winograd<OUTPUT>::output(m, row);
#pragma unroll
      for (int j = 0; j < OUTPUT; j += WIDTH) {
        Pixels<WIDTH> pixels;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          const float sum = row[j + k] + bias + addends[i][j + k];  // in the order of `epilogue`
          pixels.at[k] = sum < least ? least : sum;  // keeps NaN
        }
        if (has(i, j)) *reinterpret_cast<Pixels<WIDTH>*>(out + first + i * p.ow + j) = pixels;
      }
    }
  }
};

// `turn`: which buffer of sums is next.
__device__ __forceinline__ void finish_part(Shared& shared, const Sums& sums, int part,
                                            const ConvShape& p, const WinogradParts& g,
                                            const float* bias, const float* residual, float* out,
                                            int& turn) {
  const Lane lane;  // a warp has a channel of each round, a lane a tile
  OutputTile tile{TilePlace(g, part, lane.index), part % g.blocks * TILE_M};
  tile.load(p, channel_of(0, lane.warp), bias, residual);
  write_sums(shared.sums[turn], sums, lane, 0);
  multipliers_barrier();
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round, turn ^= 1) {
    const bool last = round + 1 == ROUNDS;
    // One barrier per round: the other buffer was read before the last one. Nor does the next part
    // begin with the buffer that this one ends with.
    if (!last) write_sums(shared.sums[turn ^ 1], sums, lane, round + 1);
    if (channel_of(round, lane.warp) < TILE_M) {
      tile.write(p, &shared.sums[turn][0][lane.warp][column_of(lane.warp, lane.index)], out);
    }
    if (!last) {
      tile.load(p, channel_of(round + 1, lane.warp), bias, residual);
      multipliers_barrier();
    }
  }
}

// Grid: a CTA on each SM, or one per part if there are fewer.
extern "C" __global__ void __launch_bounds__(MULTIPLIERS + PRODUCERS, 1)
winograd_one_launch(const float* __restrict__ x, const float* __restrict__ weight,
                    const float* __restrict__ bias, const float* residual, float* out,
                    const ConvShape p, const WinogradParts g) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < TILE_STAGES; ++stage) {
      mbarrier_init(shared_address(&shared.full[stage]), 1 + PRODUCERS / 32);
      mbarrier_init(shared_address(&shared.empty[stage]), WARPS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_launch();
  if (threadIdx.x < PRODUCERS) {
    release_registers<PRODUCER_REGISTERS>();
    produce(shared, x, weight, p, g);
    return;
  }
  acquire_registers<MULTIPLIER_REGISTERS>();
  StageState state;
  int turn = 0;
  for (int part = blockIdx.x; part < g.parts; part += gridDim.x) {
    Sums sums;
    multiply_steps(sums, shared, state, g.steps);
    finish_part(shared, sums, part, p, g, bias, residual, out, turn);
  }
}
