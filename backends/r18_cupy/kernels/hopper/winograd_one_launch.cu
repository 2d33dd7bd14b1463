// Winograd F(4×4, 3×3) in one launch: neither transformed tiles nor products cross the L2. NCHW,
// float32.
//
// A persistent CTA computes 64 output channels of 16 output tiles at a time, a part. The sums of
// all 36 positions stay in registers: 36 · 1024 floats are more than half of an SM's.
// 1. Producers: a lane has one tile of one of the step's four input channels. It loads the 6 × 6
//    pixels, transforms them in registers and writes 36 values to the step's stage. The step's
//    filters, transformed and packed by the host, arrive by one bulk copy. Two teams of two warps
//    take steps in turn.
// 2. Multipliers: a warp multiplies three of the 36 positions. Each half of it has one position to
//    itself, so a lane sums 8 channels × 8 tiles with 16 operands; the third is shared by both
//    halves, 8 × 4 sums with 12 operands. Whole warps for each position, with 8 × 4 sums a lane,
//    would read a quarter more of shared memory.
// 3. Epilogue, in rounds: a thread writes some of its 8 channels' sums to shared memory, where the
//    positions meet. A lane then transforms one tile of one channel back, applies bias, residual
//    and ReLU, and writes four rows. Producers are at the next part.
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
constexpr int SIDE = 2 * QUAD;        // channels, and tiles, of a thread's sums
constexpr int WARPS = POSITIONS / 3;  // of multipliers
constexpr int MULTIPLIERS = 32 * WARPS, PRODUCERS = 128;

constexpr int PART_CHANNELS = 64, PART_TILES = 16, STEP_CHANNELS = 4;
constexpr int STAGES = 3;  // steps in shared memory

// The lanes of half a warp form a grid: along one side channels differ, along the other tiles.
constexpr int CHANNEL_LANES = PART_CHANNELS / SIDE, TILE_LANES = PART_TILES / SIDE;
constexpr int ROWS = 32 / PART_TILES;  // of tiles in as many bytes as shared memory has banks

// Producer warps that fill a stage together, and teams of such, which take steps in turn.
constexpr int TEAM = STEP_CHANNELS / ROWS, TEAMS = PRODUCERS / 32 / TEAM;

// The sums of each thread's channel i, for all i, go to shared memory in rounds: unit i has
// CHANNEL_LANES channels of PART_TILES tiles. Rounds have three or two units, and alternate between
// two buffers.
constexpr int ROUNDS = 3, BUFFER_UNITS = 5;                  // of both buffers
constexpr int UNIT_WARPS = CHANNEL_LANES * PART_TILES / 32;  // that transform a unit back
__device__ constexpr int first_unit(int round) { return (BUFFER_UNITS * round + 1) / 2; }
static_assert(first_unit(ROUNDS) == SIDE, "rounds have all units");

constexpr int FILTER_BYTES = POSITIONS * STEP_CHANNELS * PART_CHANNELS * sizeof(float);
// Bytes of a channel's filters or tiles of a position in shared memory.
constexpr int FILTER_ROW = PART_CHANNELS * sizeof(float), PIXEL_ROW = PART_TILES * sizeof(float);

// Registers per thread (setmaxnreg): 128 at launch.
constexpr int PRODUCER_REGISTERS = 104, MULTIPLIER_REGISTERS = 136;
static_assert(MULTIPLIERS * MULTIPLIER_REGISTERS + PRODUCERS * PRODUCER_REGISTERS <= 65536,
              "multipliers acquire what producers release");
static_assert(WIDTH == 1 || WIDTH == 2 || WIDTH == 4, "pixels come in vectors");

// Divides numbers below 2^31 by one that the host knows, in two instructions instead of twenty.
struct Divisor {
  unsigned number, reciprocal, shift;
};
__device__ __forceinline__ unsigned operator/(unsigned dividend, const Divisor& divisor) {
  return (unsigned)((unsigned long long)dividend * divisor.reciprocal >> divisor.shift);
}

// How a problem is divided; the host's `PARTS` in hopper/winograd_one_launch.py mirrors it field by
// field. Tiles are counted over all images, row by row. Consecutive parts have the same tiles.
struct WinogradParts {
  Divisor rows, columns;  // of tiles in an image
  Divisor blocks;         // of PART_CHANNELS output channels
  int tiles;              // of the batch
  int steps;              // of STEP_CHANNELS input channels
  int parts;
};

// Aligned as rows of all banks are, for the bulk copy.
struct alignas(128) Stage {
  float filters[POSITIONS][STEP_CHANNELS][PART_CHANNELS];
  // Neighbouring tiles are swapped: see `multiply`.
  float pixels[POSITIONS][STEP_CHANNELS][PART_TILES];
  // `full` completes a phase when the filters and the values of all threads of a team have arrived,
  // `empty` when every multiplier has read them. One thread could arrive for its warp, but racecheck
  // takes an arrival to release what that very thread accessed.
  unsigned long long full, empty;
};
static_assert(sizeof(Stage::filters) == FILTER_BYTES, "one bulk copy");

struct Shared {
  Stage stages[STAGES];
  float sums[BUFFER_UNITS][POSITIONS][CHANNEL_LANES][PART_TILES];  // of two rounds; see `column_of`
};

// The stage that is next, in bytes from the first, and the parity of its phase.
struct StageState {
  unsigned offset = 0, phase = 0;
  __device__ __forceinline__ void advance(int steps) {
    offset += steps * (unsigned)sizeof(Stage);
    if (offset >= sizeof(Shared::stages)) offset -= (unsigned)sizeof(Shared::stages), phase ^= 1;
  }
};

// Where a lane's tile is.
struct TilePlace {
  int block;  // of output channels
  bool exists;
  int n, top, left;  // of its outputs
  __device__ __forceinline__ TilePlace(const WinogradParts& g, unsigned part, int lane) {
    const unsigned group = part / g.blocks;
    block = part - group * g.blocks.number;
    const unsigned tile = group * PART_TILES + lane;
    exists = tile < (unsigned)g.tiles;
    const unsigned row = tile / g.columns;
    left = (tile - row * g.columns.number) * OUTPUT;
    n = row / g.rows;
    top = (row - n * g.rows.number) * OUTPUT;
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
  static constexpr int LOADS = 2 + OUTPUT / WIDTH;  // of a row: a pixel, vectors, a pixel
  __device__ static constexpr int width(int i) { return i == 0 || i == LOADS - 1 ? 1 : WIDTH; }
  __device__ static constexpr int column(int i) { return i == 0 ? 0 : 1 + (i - 1) * WIDTH; }

  // First pixels of the rows in the channel that is loaded next; may be outside of the image.
  const float* rows[EXTENT];
  // Bit 1 + r of inside[i]: whether load i of row r is in the image. One instruction makes
  // predicates of six bits, but not of bit 0.
  unsigned inside[LOADS];
  float d[EXTENT][EXTENT];  // rows, columns. Pixels outside of the image stay zero

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) d[r][s] = 0.0f;
    }
  }

  __device__ __forceinline__ void begin(const float* x, const ConvShape& p, const TilePlace& at,
                                        int channel) {
    const int top = at.top - p.ph, left = at.left - p.pw;
    rows[0] = x + ((long long)(at.n * p.c + channel) * (p.h * p.w) + (long long)top * p.w + left);
#pragma unroll
    for (int r = 1; r < EXTENT; ++r) rows[r] = rows[r - 1] + p.w;
    unsigned inside_rows = 0;
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      inside_rows |= (unsigned)(0 <= top + r && top + r < p.h) << (1 + r);
    }
    if (!at.exists) inside_rows = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int place = left + column(i);
      inside[i] = 0 <= place && place < p.w ? inside_rows : 0;
    }
    clear();
  }

  // The channel does not exist: in a part's last step.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) inside[i] = 0;
    clear();
  }

  // Load i of each row, where it is in the image.
  __device__ __forceinline__ void load(int i) {
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      const float* const from = rows[r] + column(i);
      __builtin_assume(__isGlobal(from));
      if (inside[i] >> (1 + r) & 1) {
        if (width(i) == 1) {
          d[r][column(i)] = *from;
        } else {
          const auto pixels = *reinterpret_cast<const Pixels<WIDTH>*>(from);
#pragma unroll
          for (int k = 0; k < WIDTH; ++k) d[r][column(i) + k] = pixels.at[k];
        }
      }
    }
  }

  // Moves on to the team's next step.
  __device__ __forceinline__ void advance(const ConvShape& p) {
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      rows[r] += (long long)(TEAMS * STEP_CHANNELS) * (p.h * p.w);
      asm volatile("" : "+l"(rows[r]));  // or each would be added up again from the first
    }
  }

  // The columns of load i, times Bᵀ.
  __device__ __forceinline__ void transform(int i, float (&half)[EXTENT][EXTENT]) const {
#pragma unroll
    for (int s = column(i); s < column(i) + width(i); ++s) {
      float pixels[EXTENT];
#pragma unroll
      for (int r = 0; r < EXTENT; ++r) pixels[r] = d[r][s];
      Winograd<OUTPUT>::input(pixels, half[s]);
    }
  }
};

__device__ __forceinline__ void produce(Shared& shared, const float* x, const float* weight,
                                        const ConvShape& p, const WinogradParts& g) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // NOTE: votes, so that the compiler knows that what follows is the same in all lanes.
  const bool leads = __any_sync(~0u, warp % TEAM == 0);  // its first lane copies filters
  const int team = __any_sync(~0u, warp >= TEAM);
  const int k = warp % TEAM * ROWS + lane / PART_TILES;  // of the step's channels
  const int whole_steps = p.c / STEP_CHANNELS;
  int part = blockIdx.x, step = team;
  const char* next_filters = nullptr;
  InputTile tile;
  // Loads the pixels of `step`, which may belong to a later part.
  const auto load = [&](bool begins) {
    if (step >= g.steps || begins) {
      for (; step >= g.steps; step -= g.steps) part += gridDim.x;
      if (part >= g.parts) return;
      const TilePlace place(g, part, lane % PART_TILES);
      next_filters = reinterpret_cast<const char*>(weight) +
                     ((size_t)place.block * g.steps + step) * FILTER_BYTES;
      tile.begin(x, p, place, step * STEP_CHANNELS + k);
    }
    if (step * STEP_CHANNELS + k >= p.c) tile.end();
#pragma unroll
    for (int i = 0; i < InputTile::LOADS; ++i) tile.load(i);
    tile.advance(p);
  };
  load(true);
  StageState state{team * (unsigned)sizeof(Stage)};
#pragma unroll 1
  for (; part < g.parts; state.advance(TEAMS)) {
    float half[EXTENT][EXTENT];  // Bᵀ d, transposed
    const char* const filters = next_filters;
    next_filters += TEAMS * FILTER_BYTES;
    step += TEAMS;
    // What is loaded now arrives until the team's next step.
    if (step < whole_steps) {
#pragma unroll
      for (int i = 0; i < InputTile::LOADS; ++i) {
        tile.transform(i, half);
        tile.load(i);  // at once, as the next step waits for it
      }
      tile.advance(p);
    } else {
#pragma unroll
      for (int i = 0; i < InputTile::LOADS; ++i) tile.transform(i, half);
      load(false);
    }
    // Each stage is empty at first: the wait is for the phase before the first, which is over.
    Stage& stage = *reinterpret_cast<Stage*>(reinterpret_cast<char*>(&shared) + state.offset);
    mbarrier_wait(shared_address(&stage.empty), state.phase ^ 1);
    const unsigned full = shared_address(&stage.full);
    if (leads && lane == 0) {
      mbarrier_arrive_expect_tx(full, FILTER_BYTES);
      bulk_load(shared_address(stage.filters), filters, FILTER_BYTES, full);
    }
    float* const out = &stage.pixels[0][k][swapped_column(lane % PART_TILES)];
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      float row[EXTENT], v[EXTENT];
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) row[s] = half[s][r];
      Winograd<OUTPUT>::input(row, v);
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) out[(r * EXTENT + s) * STEP_CHANNELS * PART_TILES] = v[s];
    }
    // NOTE: no `fence.proxy.async`, which would wait for the pixels above. The async proxy writes
    // filters only, and what is stored here is read with ordinary loads.
    mbarrier_arrive(full);
  }
}

// -- multipliers ----------------------------------------------------------------------------------

// sum += channels times tiles. See `Accumulator::multiply` in conv/sgemm.cuh: sums are in vectors
// along the tiles, which are swapped pairwise in shared memory, so that a tile's operand and its
// sums are in different banks of registers; and each product shares an operand with the one before.
template <int TILES>
__device__ __forceinline__ void multiply(float (&sum)[SIDE][TILES],
                                         const float (&left)[SIDE],
                                         const float (&right)[TILES]) {
#pragma unroll
  for (int i = 0; i < SIDE; i += 2) {
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

// values[i] = row[i / 4 · LENGTH / 2 + i % 4]: quads that are half a row apart.
template <int LENGTH, int COUNT>
__device__ __forceinline__ void load_quads(float (&values)[COUNT], unsigned row) {
  constexpr int HALF_BYTES = LENGTH / 2 * sizeof(float);
#pragma unroll
  for (int i = 0; i < COUNT; i += QUAD) load_quad(values + i, row + i / QUAD * HALF_BYTES);
}

// Where a tile of a unit's channel is in `Shared::sums`. Every other ROWS channels have their
// halves swapped: lanes that write neighbouring channels at once then touch different banks.
__device__ __forceinline__ int column_of(int channel, int tile) {
  return tile ^ channel / ROWS % 2 * (PART_TILES / 2);
}

// A thread's sums. Channels i of `own`: 4 · channel_lane + i / 4 · 32 + i % 4; tiles i:
// 4 · tile_lane + i / 4 · 8 + i % 4. `common` has the same channels, and the tiles of its half of
// the warp: 8 · (lane / 16) + 4 · tile_lane + i.
struct Sums {
  float own[SIDE][SIDE];     // of the position of the lane's half of the warp
  float common[SIDE][QUAD];  // of the position that the halves share
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
    channel = index % 2 + index / (2 * TILE_LANES) % (CHANNEL_LANES / 2) * 2;
    tile = index / 2 % TILE_LANES;
  }
  __device__ __forceinline__ int own_position() const { return 3 * warp + half; }
  __device__ __forceinline__ int common_position() const { return 3 * warp + 2; }
};

// Sums a part's products over all steps.
__device__ __forceinline__ void multiply_steps(Sums& sums, const Shared& shared, StageState& state,
                                               int steps) {
  const Lane lane;
  float left[SIDE], right[SIDE];  // operands of `own`
  float common_left[SIDE], common_right[QUAD];
  // Addresses in the first stage, and what leads from there to the input channel.
  const Stage& first = shared.stages[0];
  const unsigned full = shared_address(&first.full), empty = shared_address(&first.empty);
  const int own = lane.own_position(), common = lane.common_position();
  const int channel = QUAD * lane.channel, tile = QUAD * lane.tile;
  const unsigned filters = shared_address(&first.filters[own][0][channel]);
  const unsigned pixels = shared_address(&first.pixels[own][0][tile]);
  const unsigned common_filters = shared_address(&first.filters[common][0][channel]);
  const unsigned common_pixels =
      shared_address(&first.pixels[common][0][tile + PART_TILES / 2 * lane.half]);
  const auto load_own = [&](int k) {
    load_quads<PART_CHANNELS>(left, filters + state.offset + k * FILTER_ROW);
    load_quads<PART_TILES>(right, pixels + state.offset + k * PIXEL_ROW);
  };
  const auto load_common = [&](int k) {
    load_quads<PART_CHANNELS>(common_left, common_filters + state.offset + k * FILTER_ROW);
    load_quads<PART_TILES>(common_right, common_pixels + state.offset + k * PIXEL_ROW);
  };
  const auto await_stage = [&] { mbarrier_wait(full + state.offset, state.phase); };
#pragma unroll
  for (int i = 0; i < SIDE; ++i) {
#pragma unroll
    for (int j = 0; j < SIDE; ++j) sums.own[i][j] = 0.0f;
#pragma unroll
    for (int j = 0; j < QUAD; ++j) sums.common[i][j] = 0.0f;
  }
  // NOTE: these always hold, which the compiler does not know: what is behind a condition is a
  // block of its own. Of more products at once the assembler changes the order, which takes more
  // registers than there are, and costs the operands that products share. A loop over the step's
  // channels would end its blocks with four more instructions.
  const bool always[] = {__any_sync(~0u, filters != common_filters),
                         __any_sync(~0u, pixels != common_pixels),
                         __any_sync(~0u, filters != pixels)};
  static_assert(sizeof(always) == STEP_CHANNELS - 1, "one for each channel but the last");
  await_stage();
  load_own(0);
  for (int step = 1; step <= steps; ++step) {
    // One position's operands arrive while the other's are multiplied.
#pragma unroll
    for (int k = 0; k < STEP_CHANNELS - 1; ++k) {
      if (always[k]) {
        load_common(k);
        multiply(sums.own, left, right);
        load_own(k + 1);
        multiply(sums.common, common_left, common_right);
      }
    }
    load_common(STEP_CHANNELS - 1);
    multiply(sums.own, left, right);
    mbarrier_arrive(empty + state.offset);  // after this stage's last reads
    state.advance(1);
    if (step < steps) {
      await_stage();
      load_own(0);
    }
    multiply(sums.common, common_left, common_right);
  }
}

// -- epilogue -------------------------------------------------------------------------------------

__device__ __forceinline__ void multipliers_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
}

// Writes the sums of a round to its buffer.
__device__ __forceinline__ void write_sums(Shared& shared, const Sums& sums, const Lane& lane,
                                           int round) {
  const int channel = lane.channel, tile = QUAD * lane.tile;
#pragma unroll
  for (int i = first_unit(round); i < first_unit(round + 1); ++i) {
    auto& to = shared.sums[i % BUFFER_UNITS];
    const auto write = [&](int position, int tile, const float* quad) {
      *reinterpret_cast<float4*>(&to[position][channel][column_of(channel, tile)]) =
          make_float4(quad[0], quad[1], quad[2], quad[3]);
    };
    write(lane.own_position(), tile, sums.own[i]);
    write(lane.own_position(), tile + PART_TILES / 2, sums.own[i] + QUAD);
    write(lane.common_position(), tile + lane.half * (PART_TILES / 2), sums.common[i]);
  }
}

// What a lane transforms back in a round: a row of tiles has a channel of a unit.
struct Share {
  int tile, channel;  // of the unit
  int unit;           // of the round
  __device__ __forceinline__ explicit Share(const Lane& lane)
      : tile(lane.index % PART_TILES),
        channel(lane.warp % UNIT_WARPS * ROWS + lane.index / PART_TILES),
        unit(lane.warp / UNIT_WARPS) {}

  __device__ __forceinline__ bool is_in(int round) const {
    return first_unit(round) + unit < first_unit(round + 1);
  }
  // The channel of the part; PART_CHANNELS if the round has none for the lane.
  __device__ __forceinline__ int channel_of_part(int round) const {
    const int i = first_unit(round) + unit;
    if (!is_in(round)) return PART_CHANNELS;
    return channel * QUAD + i / QUAD * (PART_CHANNELS / 2) + i % QUAD;
  }
};

// A lane's output tile in one channel after another: the place, and what the epilogue adds.
struct OutputTile {
  TilePlace at;
  int rows, columns;  // of the tile inside of the image; no rows of a channel that does not exist
  size_t first;       // element of the tile's first pixel
  float bias;
  float addends[OUTPUT][OUTPUT];  // of the residual

  __device__ __forceinline__ bool has(int i, int j) const { return i < rows && j < columns; }

  // Moves to a channel of the part. Loads bias and residual, or zeros, ahead of their use: their
  // latency is longer than the transform's.
  __device__ __forceinline__ void load(const ConvShape& p, int channel_of_part,
                                       const float* biases, const float* residual) {
    const int channel = at.block * PART_CHANNELS + channel_of_part;
    const bool exists = at.exists && channel_of_part < PART_CHANNELS && channel < p.o;
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
      for (int r = 0; r < EXTENT; ++r) m[r] = sums[(r * EXTENT + s) * CHANNEL_LANES * PART_TILES];
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

__device__ __forceinline__ void finish_part(Shared& shared, const Sums& sums, int part,
                                            const ConvShape& p, const WinogradParts& g,
                                            const float* bias, const float* residual, float* out) {
  const Lane lane;
  const Share share(lane);
  // The last part's last round may still be read where this one's first is written.
  multipliers_barrier();
  write_sums(shared, sums, lane, 0);
  OutputTile tile{TilePlace(g, part, share.tile)};
  tile.load(p, share.channel_of_part(0), bias, residual);
  multipliers_barrier();
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const bool last = round + 1 == ROUNDS;
    // One barrier per round: the other buffer was read before the last one.
    if (!last) write_sums(shared, sums, lane, round + 1);
    if (share.is_in(round)) {
      const int unit = first_unit(round) % BUFFER_UNITS + share.unit;
      tile.write(p, &shared.sums[unit][0][share.channel][column_of(share.channel, share.tile)],
                 out);
    }
    if (!last) {
      tile.load(p, share.channel_of_part(round + 1), bias, residual);
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
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared_address(&shared.stages[stage].full), 1 + 32 * TEAM);
      mbarrier_init(shared_address(&shared.stages[stage].empty), MULTIPLIERS);
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
  for (int part = blockIdx.x; part < g.parts; part += gridDim.x) {
    Sums sums;
    multiply_steps(sums, shared, state, g.steps);
    finish_part(shared, sums, part, p, g, bias, residual, out);
  }
}
