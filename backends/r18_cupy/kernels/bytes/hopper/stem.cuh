// The stem of a network of bytes: 7×7 windows on an image of few channels, fused with max-pooling,
// on Hopper's tensor cores (wgmma): the layout of shared memory. The kernel is in stem_kernel.cuh.
//
// B without im2col: a chunk of 16 bytes of K holds four pixels. Windows of every other column begin
// four pixels apart, so the second chunk of a column is the first of the next but one. A line has
// two copies: for even columns as it is, for odd columns moved by two pixels. Rows of B are the
// even columns, then the odd ones. Eight columns are a core matrix of the layout without swizzle; a
// group has one chunk more, the second one of its last column, so that groups can be anywhere:
//
//   group of 144 bytes: chunks c, c + 1, …, c + 7 of its columns, and chunk c + 8
//
// The including file defines TILE_* and LINE_NOTES.
#pragma once
#include "stem/strips.cuh"

constexpr int WINDOW = 7, PADDING = 3;
constexpr int COLUMNS = TILE_M / ROWS;   // per row of the convolution
constexpr int HALF = COLUMNS / 2;        // even columns; pooled columns
constexpr int GROUPS = HALF / 8;         // of eight even columns
constexpr int GROUP_BYTES = 9 * 16;
constexpr int ODD_BYTES = GROUPS * GROUP_BYTES;  // where the copy for odd columns begins
constexpr int LINE_BYTES = 2 * ODD_BYTES;
constexpr int STAGE_LINES = ROWS * STRIDE;
// Behind a stage's lines, LINE_NOTES bytes of notes about each.
constexpr int NOTES = STAGE_LINES * LINE_BYTES;
constexpr int STAGE_BYTES = NOTES + STAGE_LINES * LINE_NOTES;
constexpr int STAGES = 6;
constexpr int CONSUMERS = 128, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
constexpr int QUADS = HALF + 2;          // fours of pixels per line
constexpr int LINE_THREADS = 64;         // producer threads per line
constexpr int OWN_LINES = STAGE_LINES * LINE_THREADS / PRODUCERS;  // of a stage, per thread
constexpr int AHEAD = 3;                 // stages that a producer thread reads ahead of writing
constexpr int STORED = (GROUPS + 3) / 4 * 4;   // matrices that stmatrix writes, in fours
constexpr int STAGING_BYTES = STORED * 8 * 16;  // per warp

static_assert(TILE_N == 64, "a warpgroup multiplies 64 channels");
static_assert(TILE_K == 32, "a row of the window is one wgmma");
static_assert(HALF % 8 == 0, "columns come in core matrices of eight even or odd ones");
static_assert(QUADS <= LINE_THREADS, "a producer thread reads one quad of a line");
static_assert(POOL, "this kernel always pools");
static_assert(STAGES >= 4, "a turn reads three stages, and producers need one more");

// Registers per thread (setmaxnreg): producers release theirs to the consumers.
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 184;
static_assert(TILE_BLOCKS == 2, "two CTAs share an SM");
static_assert(PRODUCER_REGISTERS + CONSUMER_REGISTERS <= 2 * 128,
              "the two warpgroups have 128 registers per thread on average");

// A place in the ring of stages.
struct Place {
  int slot = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
};

// A consumer thread's share of the weights.
using Weights = unsigned[WINDOW][4];

// A line of the ring: its stage's address in units of 16 bytes, as descriptors have it, and its
// number in the stage.
struct Line {
  unsigned stage;
  int number;
};

// Descriptor of a line's columns: 144 bytes from one group of eight to the next, 16 from one chunk
// of K to the next.
__device__ __forceinline__ unsigned long long columns_at(const Line& line) {
  return (unsigned long long)(GROUP_BYTES / 16) << 32 | 1u << 16 |
         line.stage + line.number * (LINE_BYTES / 16);
}
