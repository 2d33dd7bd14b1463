// Winograd F(2×2, 3×3) in one launch for small batches, with split-K across a cluster: its CTAs
// divide the input channels. NCHW, float32.
//
// A CTA computes TILE_M output channels of TILE_N output tiles over its part of the input channels,
// TILE_K at a time. The sums of all 16 positions stay in registers.
// 1. Producers: a thread loads the 4 × 4 pixels of one tile of one channel, transforms them and
//    writes 16 values to the step's stage. The step's filters, transformed and packed by the host,
//    arrive by one bulk copy; the first are requested before the previous launch has ended.
// 2. Multipliers: each half of a warp multiplies one position.
// 3. The sums go to shared memory, where the positions meet. A thread transforms one tile of one
//    channel back, and sends it to the CTA that adds up this tile. Tiles of its own CTA it stores.
// 4. Each CTA adds up its share of the tiles over the parts, in their order, applies bias, residual
//    and ReLU, and writes them. Multipliers have loaded the residual before the first product,
//    producers after their last tile.
//
// Compared to conv/winograd_*.cu there is one launch instead of three, and neither transformed
// tiles nor products cross the L2. But each block of TILE_M channels transforms the tiles again.
//
// In the main loop three of four issue slots are used, and three of four instructions are products.
// Two warps of multipliers and one of producers share each of an SM's schedulers.
//
// NOTE: no `launch_dependents`. Launched again and again, this kernel is faster with it, but in a
// network the next launch's CTAs crowd onto the SMs that have none of this one's.
//
// Constraints: sm_90 and later with 162 KiB of shared memory for a block, so not sm_120; stride 1,
// windows of 3×3; gridDim.z = TILE_PARTS, at most 8, the portable size of a cluster.
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_divide.cuh"
#include "conv/winograd.cuh"
#include "hopper/bulk.cuh"
#include "hopper/cluster_send.cuh"

constexpr int OUTPUT = 2, EXTENT = OUTPUT + 2, POSITIONS = EXTENT * EXTENT;
constexpr int PRODUCERS = 128, MULTIPLIERS = 16 * POSITIONS;
constexpr int THREADS = PRODUCERS + MULTIPLIERS;

// The lanes of half a warp form a square: along one side channels differ, along the other tiles.
constexpr int SIDE = 4;
constexpr int LANE_CHANNELS = TILE_M / SIDE, LANE_TILES = TILE_N / SIDE;

// Threads along the tiles, where tiles are transformed; the others are along the channels.
constexpr int TILE_LANES = TILE_N <= 16 ? 16 : 32;
// Channels that producers transform at a time, tiles of each in a step, and channels that all
// threads transform back at a time.
constexpr int ROWS = PRODUCERS / TILE_LANES, ITEMS = TILE_K / ROWS;
constexpr int BACK_ROWS = THREADS / TILE_LANES;
static_assert(TILE_M % SIDE == 0 && TILE_N % SIDE == 0, "lanes have equal shares");
static_assert(TILE_N <= TILE_LANES && TILE_K % ROWS == 0, "producers have whole steps");
static_assert(PRODUCERS % TILE_LANES == 0 && THREADS % TILE_LANES == 0, "whole rows of threads");
static_assert(TILE_PARTS <= 8, "clusters of a portable size");

// The output tiles, of all TILE_M channels, that a CTA adds up.
constexpr int SHARE = (TILE_M * TILE_N + TILE_PARTS - 1) / TILE_PARTS;
static_assert((TILE_PARTS - 1) * SHARE < TILE_M * TILE_N, "every part has a share");
constexpr int SHARE_ROUNDS = (SHARE + THREADS - 1) / THREADS;

template <int WIDTH>
struct alignas(WIDTH * sizeof(float)) Vector {
  float at[WIDTH];
};
template <int WIDTH>
__device__ __forceinline__ void copy_vector(float* to, const float* from) {
  *reinterpret_cast<Vector<WIDTH>*>(to) = *reinterpret_cast<const Vector<WIDTH>*>(from);
}

// A row of shared memory with COUNT values for each of SIDE lanes: element e of the row is value
// e / SIDE of lane e % SIDE. The lanes' first four values come first, side by side, then the next
// four. The last COUNT % 4 values are one vector of each lane; three are padded to four.
template <int COUNT>
struct Row {
  static constexpr int WHOLE = COUNT / 4 * 4, REST = COUNT % 4 == 3 ? 4 : COUNT % 4;
  static constexpr int PER_LANE = WHOLE + REST, FLOATS = SIDE * PER_LANE;

  // Where value i of a lane is, and where an element is. The host's `row_places` mirrors it.
  __device__ static constexpr int place(int lane, int i) {
    return i < WHOLE ? i / 4 * 4 * SIDE + lane * 4 + i % 4 : WHOLE * SIDE + lane * REST + i - WHOLE;
  }
  __device__ static constexpr int place(int element) {
    return place(element % SIDE, element / SIDE);
  }

  __device__ __forceinline__ static void load(float (&values)[PER_LANE], const float* row,
                                              int lane) {
#pragma unroll
    for (int i = 0; i < WHOLE; i += 4) copy_vector<4>(values + i, row + place(lane, i));
    if constexpr (REST > 0) copy_vector<REST>(values + WHOLE, row + place(lane, WHOLE));
  }
  __device__ __forceinline__ static void store(const float (&values)[PER_LANE], float* row,
                                               int lane) {
#pragma unroll
    for (int i = 0; i < WHOLE; i += 4) copy_vector<4>(row + place(lane, i), values + i);
    if constexpr (REST > 0) copy_vector<REST>(row + place(lane, WHOLE), values + WHOLE);
  }
};
using Channels = Row<LANE_CHANNELS>;
using Tiles = Row<LANE_TILES>;

// Rows of sums begin 16 banks apart, as eight lanes store to two of them.
constexpr int SUM_PITCH = (Tiles::FLOATS + 15) / 32 * 32 + 16;
static_assert(SUM_PITCH >= Tiles::FLOATS, "a row of sums");

struct alignas(128) Stage {
  float filters[TILE_K][POSITIONS][Channels::FLOATS];
  float pixels[TILE_K][POSITIONS][Tiles::FLOATS];
};
constexpr int FILTER_FLOATS = TILE_K * POSITIONS * Channels::FLOATS;
constexpr int FILTER_BYTES = FILTER_FLOATS * sizeof(float);
static_assert(sizeof(Stage::filters) == FILTER_BYTES, "one bulk copy");

struct Shared {
  union {
    Stage stages[TILE_STAGES];
    float sums[POSITIONS][TILE_M][SUM_PITCH];
  };
  float4 outputs[TILE_PARTS][SHARE];  // by all parts, for this CTA to add up: two rows of two
  // `full` completes a phase when the filters and the values of all producers have arrived, `empty`
  // when every multiplier has read them.
  unsigned long long full[TILE_STAGES], empty[TILE_STAGES];
  unsigned long long arrived;  // all that other parts send to `outputs`
};

// How a problem is divided; the host's `PARTS` in hopper/winograd_cluster.py mirrors it field by
// field. Tiles are counted over all images, row by row.
struct WinogradParts {
  FastDivisor rows, columns;  // of tiles in an image
  int tiles;                  // of the batch
  int steps;                  // of TILE_K input channels
  int part_steps;             // at most, of a part
};

// Where the outputs of a tile are.
struct TilePlace {
  bool exists;
  int n, top, left;
  __device__ __forceinline__ TilePlace(const WinogradParts& g, int tile_of_group) {
    const unsigned tile = blockIdx.x * TILE_N + tile_of_group;
    exists = tile_of_group < TILE_N && tile < (unsigned)g.tiles;
    const unsigned row = quotient(tile, g.columns);
    left = (tile - row * g.columns.divisor) * OUTPUT;
    n = quotient(row, g.rows);
    top = (row - n * g.rows.divisor) * OUTPUT;
  }
};

// -- producers ------------------------------------------------------------------------------------

// A thread's input tile in one channel after another.
class InputTile {
 public:
  __device__ __forceinline__ InputTile(const float* x, const ConvShape& p, const TilePlace& at,
                                       int channel)
      : x_(x), channel_(channel), inside_(0) {
    const int top = at.top - p.ph, left = at.left - p.pw;
    first_ = ((at.n * p.c + channel) * p.h + top) * p.w + left;
    unsigned columns = 0;
#pragma unroll
    for (int s = 0; s < EXTENT; ++s) columns |= (unsigned)(inside(left + s, p.w)) << s;
    if (!at.exists) columns = 0;
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      if (inside(top + r, p.h)) inside_ |= columns << r * EXTENT;
    }
  }

  // Loads the pixels of the thread's next channel, zeros where there are none.
  __device__ __forceinline__ void load(const ConvShape& p, float (&d)[EXTENT][EXTENT]) {
    const unsigned inside = channel_ < p.c ? inside_ : 0;
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) {
      const float* const row = x_ + (first_ + r * p.w);
#pragma unroll
      for (int s = 0; s < EXTENT; ++s) d[r][s] = inside >> (r * EXTENT + s) & 1 ? row[s] : 0.0f;
    }
    channel_ += ROWS;
    first_ += ROWS * (p.h * p.w);
  }

 private:
  __device__ __forceinline__ static bool inside(int place, int extent) {
    return (unsigned)place < (unsigned)extent;
  }

  const float* x_;
  int channel_;
  int first_;        // of the pixels; may be outside of the image
  unsigned inside_;  // bit 4 r + s: whether pixel (r, s) is in the image
};

// half = Bᵀ d, transposed
__device__ __forceinline__ void transform_columns(const float (&d)[EXTENT][EXTENT],
                                                  float (&half)[EXTENT][EXTENT]) {
#pragma unroll
  for (int s = 0; s < EXTENT; ++s) {
    const float column[EXTENT] = {d[0][s], d[1][s], d[2][s], d[3][s]};
    Winograd<OUTPUT>::input(column, half[s]);
  }
}

// Writes half B; `out`: its place at position 0.
__device__ __forceinline__ void transform_rows(const float (&half)[EXTENT][EXTENT], float* out) {
#pragma unroll
  for (int r = 0; r < EXTENT; ++r) {
    const float row[EXTENT] = {half[0][r], half[1][r], half[2][r], half[3][r]};
    float v[EXTENT];
    Winograd<OUTPUT>::input(row, v);
#pragma unroll
    for (int s = 0; s < EXTENT; ++s) out[(r * EXTENT + s) * Tiles::FLOATS] = v[s];
  }
}

// Requests a step's filters. One thread. `filters`: those of the part's first step.
__device__ __forceinline__ void request_filters(Shared& shared, const float* filters, int step) {
  const unsigned full = shared_address(&shared.full[step % TILE_STAGES]);
  mbarrier_arrive_expect_tx(full, FILTER_BYTES);
  bulk_load(shared_address(shared.stages[step % TILE_STAGES].filters),
            filters + (size_t)step * FILTER_FLOATS, FILTER_BYTES, full);
}

__device__ __forceinline__ void produce(Shared& shared, InputTile& tile, const float* filters,
                                        int steps, const ConvShape& p) {
  const int lane = threadIdx.x % TILE_LANES, row = threadIdx.x / TILE_LANES;
  float d[ITEMS][EXTENT][EXTENT];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) tile.load(p, d[i]);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int index = step % TILE_STAGES;
    Stage& stage = shared.stages[index];
    if (step >= TILE_STAGES) {
      mbarrier_wait(shared_address(&shared.empty[index]), step / TILE_STAGES % 2 ^ 1);
      if (threadIdx.x == 0) request_filters(shared, filters, step);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      float half[EXTENT][EXTENT];
      transform_columns(d[i], half);
      if (step + 1 < steps) tile.load(p, d[i]);  // at once, as the next step waits for it
      if (lane < TILE_N) transform_rows(half, &stage.pixels[i * ROWS + row][0][Tiles::place(lane)]);
    }
    mbarrier_arrive(shared_address(&shared.full[index]));
  }
}

// -- multipliers ----------------------------------------------------------------------------------

// A multiplier's place among all, and what it sums.
struct Multiplier {
  int position, channel_lane, tile_lane;
  float sums[LANE_CHANNELS][Tiles::PER_LANE] = {};

  // NOTE: four neighbouring lanes have two channels and two tiles. A 128-bit read of shared memory
  // takes half as long if they read at most two addresses.
  __device__ __forceinline__ explicit Multiplier(int index)
      : position(index / (SIDE * SIDE)),
        channel_lane(index / 2 % 2 + index / 8 % 2 * 2),
        tile_lane(index % 2 + index / 4 % 2 * 2) {}

  __device__ __forceinline__ void multiply(const Stage& stage, int k) {
    float left[Channels::PER_LANE], right[Tiles::PER_LANE];
    Channels::load(left, stage.filters[k][position], channel_lane);
    Tiles::load(right, stage.pixels[k][position], tile_lane);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) {
#pragma unroll
      for (int q = 0; q < LANE_TILES; ++q) {
        const int j = i % 2 ? LANE_TILES - 1 - q : q;  // back and forth: products share an operand
        sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
      }
    }
  }

  __device__ __forceinline__ void multiply_steps(Shared& shared, int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int index = step % TILE_STAGES;
      mbarrier_wait(shared_address(&shared.full[index]), step / TILE_STAGES % 2);
#pragma unroll
      for (int k = 0; k < TILE_K; ++k) multiply(shared.stages[index], k);
      if (step + TILE_STAGES < steps) mbarrier_arrive(shared_address(&shared.empty[index]));
    }
  }

  __device__ __forceinline__ void store(Shared& shared) const {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) {
      Tiles::store(sums[i], shared.sums[position][i * SIDE + channel_lane], tile_lane);
    }
  }
};

// -- epilogue -------------------------------------------------------------------------------------

// The sums of a tile at all positions, transformed back: two rows of two. `sums`: at position 0.
__device__ __forceinline__ float4 transform_back(const float* sums) {
  float half[EXTENT][OUTPUT];  // Aᵀ m, transposed
#pragma unroll
  for (int s = 0; s < EXTENT; ++s) {
    float m[EXTENT];
#pragma unroll
    for (int r = 0; r < EXTENT; ++r) m[r] = sums[(r * EXTENT + s) * TILE_M * SUM_PITCH];
    Winograd<OUTPUT>::output(m, half[s]);
  }
  float rows[OUTPUT][OUTPUT];
#pragma unroll
  for (int i = 0; i < OUTPUT; ++i) {
    const float m[EXTENT] = {half[0][i], half[1][i], half[2][i], half[3][i]};
    Winograd<OUTPUT>::output(m, rows[i]);
  }
  return {rows[0][0], rows[0][1], rows[1][0], rows[1][1]};
}

// Transforms all sums back and sends each tile to the part that adds it up. This part's own tiles
// are stored, and need a barrier of all threads.
__device__ __forceinline__ void send_outputs(Shared& shared, const Arrivals& arrivals) {
  const int lane = threadIdx.x % TILE_LANES, row = threadIdx.x / TILE_LANES;
  if (lane >= TILE_N) return;
#pragma unroll
  for (int i = 0; i < (TILE_M + BACK_ROWS - 1) / BACK_ROWS; ++i) {
    const int channel = i * BACK_ROWS + row;
    if (TILE_M % BACK_ROWS && channel >= TILE_M) break;
    const int index = channel * TILE_N + lane, part = index / SHARE;
    float4& place = shared.outputs[blockIdx.z][index - part * SHARE];
    const float4 four = transform_back(&shared.sums[0][channel][Tiles::place(lane)]);
    if (part == (int)blockIdx.z) {
      place = four;
    } else {
      cluster_send(cluster_address(shared_address(&place), part), {four.x, four.y, four.z, four.w},
                   cluster_address(arrivals.mbarrier, part));
    }
  }
}

// A tile of one output channel: its place, bias and residual.
struct OutputTile {
  int widths[OUTPUT];  // pixels of each row that exist
  unsigned first;      // of the pixels
  float bias, addends[OUTPUT][OUTPUT];

  // `index`: among the tiles of all TILE_M channels; from `end` on there are none.
  __device__ __forceinline__ void load(const ConvShape& p, const WinogradParts& g, int index,
                                       int end, const float* biases, const float* residual) {
    const int channel = blockIdx.y * TILE_M + index / TILE_N;
    const TilePlace at(g, index % TILE_N);
    const bool exists = index < end && at.exists && channel < p.o;
#pragma unroll
    for (int i = 0; i < OUTPUT; ++i) {
      widths[i] = exists && at.top + i < p.oh ? min(OUTPUT, p.ow - at.left) : 0;
    }
    first = ((at.n * p.o + channel) * p.oh + at.top) * p.ow + at.left;
    bias = biases && exists ? biases[channel] : 0.0f;
#pragma unroll
    for (int i = 0; i < OUTPUT; ++i) {
#pragma unroll
      for (int j = 0; j < OUTPUT; ++j) {
        addends[i][j] = residual && j < widths[i] ? residual[first + i * p.ow + j] : 0.0f;
      }
    }
  }

  // Applies the epilogue and writes the rows, as vectors if OW is even.
  __device__ __forceinline__ void write(const ConvShape& p, const float4& sums, float* out) const {
    const float least = p.relu ? 0.0f : __int_as_float(0xff800000);  // -infinity
    const float rows[OUTPUT][OUTPUT] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
    for (int i = 0; i < OUTPUT; ++i) {
      Vector<OUTPUT> pixels;
#pragma unroll
      for (int j = 0; j < OUTPUT; ++j) {
        const float sum = rows[i][j] + bias + addends[i][j];  // in the order of `epilogue`
        pixels.at[j] = sum < least ? least : sum;             // keeps NaN
      }
      float* const to = out + (first + i * p.ow);
      if (p.ow % OUTPUT == 0) {
        if (widths[i]) *reinterpret_cast<Vector<OUTPUT>*>(to) = pixels;
      } else {
#pragma unroll
        for (int j = 0; j < OUTPUT; ++j) {
          if (j < widths[i]) to[j] = pixels.at[j];
        }
      }
    }
  }
};

// Grid: x, groups of TILE_N tiles; y, blocks of TILE_M channels; z, the parts, one cluster.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(1, 1, TILE_PARTS)
winograd_cluster(const float* __restrict__ x, const float* __restrict__ weight,
                 const float* __restrict__ bias, const float* residual, float* out,
                 const ConvShape p, const WinogradParts g) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const bool produces = threadIdx.x < PRODUCERS, leads = threadIdx.x == PRODUCERS;
  const int first_step = blockIdx.z * g.part_steps;
  const int steps = min(g.steps - first_step, g.part_steps);  // may be none
  const float* const filters = weight + (size_t)(blockIdx.y * g.steps + first_step) * FILTER_FLOATS;
  // The output tiles that this CTA adds up.
  const int begin = blockIdx.z * SHARE, end = min(begin + SHARE, TILE_M * TILE_N);
  const Arrivals arrivals{shared_address(&shared.arrived),
                          (end - begin) * (TILE_PARTS - 1) * (int)sizeof(float4)};

  if (leads) {
    for (int stage = 0; stage < TILE_STAGES; ++stage) {
      mbarrier_init(shared_address(&shared.full[stage]), 1 + PRODUCERS);
      mbarrier_init(shared_address(&shared.empty[stage]), MULTIPLIERS);
    }
    arrivals.init();
    mbarrier_init_fence();
  }
  InputTile tile(x, p, TilePlace(g, threadIdx.x % TILE_LANES),
                 first_step * TILE_K + threadIdx.x / TILE_LANES);
  __syncthreads();
  cluster_arrive_relaxed();  // others may send to this CTA
  if (leads) {
#pragma unroll 1
    for (int step = 0; step < min(steps, TILE_STAGES); ++step) {
      request_filters(shared, filters, step);
    }
  }
  wait_for_previous_launch();

  if (produces) produce(shared, tile, filters, steps, p);
  // Multipliers load while they wait for the first step, producers after the last.
  OutputTile outputs[SHARE_ROUNDS];
#pragma unroll
  for (int i = 0; i < SHARE_ROUNDS; ++i) {
    outputs[i].load(p, g, begin + i * THREADS + threadIdx.x, end, bias, residual);
  }
  Multiplier multiplier((int)threadIdx.x - PRODUCERS);
  if (!produces) multiplier.multiply_steps(shared, steps);
  // NOTE: a barrier of the multipliers alone would do here. Racecheck then reports the sums' readers.
  __syncthreads();  // the sums overlay the stages
  if (!produces) multiplier.store(shared);
  __syncthreads();
  cluster_wait();
  send_outputs(shared, arrivals);
  __syncthreads();
  arrivals.wait();
#pragma unroll
  for (int i = 0; i < SHARE_ROUNDS; ++i) {
    if (outputs[i].widths[0] == 0) continue;
    const int index = i * THREADS + threadIdx.x;
    float4 total = shared.outputs[0][index];
#pragma unroll
    for (int part = 1; part < TILE_PARTS; ++part) {
      const float4 four = shared.outputs[part][index];
      total.x += four.x, total.y += four.y, total.z += four.z, total.w += four.w;
    }
    outputs[i].write(p, total, out);
  }
}
