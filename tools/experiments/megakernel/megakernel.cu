// ResNet-18 after its stem, fp16, one image, in one persistent launch: an experiment.
//
// A CTA per SM works through a list of items that the host made (table.py). An item is a tile of a
// convolution: 56 pixels by 16 or 32 channels, over a slice of the input channels.
// 1. It takes its weights from shared memory into registers, where cp.async brought them while the
//    items before were computed. Each thread copies only what it reads itself.
// 2. It loads the image region under its windows, once, into shared memory.
// 3. Each of eight warps multiplies 16 channels by 56 pixels over its share of the slice, by
//    mma.sync. Window positions are offsets into the region, so nothing is gathered.
// 4. The warps' sums meet in shared memory. Where several items share a tile (split-K), each sends
//    its sums to the item that adds this part of the tile, through the L2.
// 5. Bias, residual and ReLU; the outputs are stored as fp16.
//
// No flags and no fences. All that CTAs write for each other, activations and partial sums, is
// UNWRITTEN before, a NaN that no arithmetic yields. A reader loads what it needs until no word of
// it is UNWRITTEN, so data and signal take one trip through the L2 instead of three. The arena has
// two halves that alternate from run to run: each run clears the half of the next one while it
// waits for the stem.
//
// No deadlock: all CTAs are resident, their lists are increasing in one order of all items, an item
// depends on items of earlier layers and, for split-K, on items that share its tile, and no CTA has
// two of those (table.py checks it).
#ifndef EMULATED
#include "primitives.cuh"
#endif

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int PIXELS = 56, TILES = PIXELS / 8;  // of an item; n8 tiles of mma.sync
constexpr int TAPS = 9;
constexpr int UNITS = PIXELS * 4;  // of 16 channels: four channels of a pixel each
// A warp's sums in shared memory, [pixel][channel]. The pitch keeps lanes in different banks.
constexpr int SUM_PITCH = 80, SUMS_BYTES = PIXELS * SUM_PITCH;
constexpr int SLOT_BYTES = WARPS * TAPS * 512;  // weights of an item
constexpr int MEANS_BYTES = PIXELS * 16;
constexpr unsigned UNWRITTEN = 0xffffffffu;
constexpr int MOST_PARTS = 8;
constexpr int STAMPS_OF_ITEM = 6;
constexpr unsigned PATIENCE = 1u << 19;  // polls of a thread until it reports a deadlock

// table.py reads the names of the fields here. Offsets are in bytes; `from_stem` and the like select
// the memory.
struct alignas(16) Item {
  int kind;                                         // 0: convolution, 1: classifier
  int taps, halves, chunks;                         // 9 or 1; 16 channels each; of weights/thread
  int from_stem, source, height, width, pixel;      // the input's slice; bytes per pixel
  int y, x, step;                                   // first pixel of the region; its stride
  int region, columns, magic, shift;                // pixels; columns; log2 of chunks per pixel
  int pitch, row_pitch, half;                       // in shared memory; even columns if they lead
  int tile_columns, tile_magic, pixels;             // of outputs
  int tile_row, tap1, tap2;                         // bytes between rows, to taps 1 and 2
  int weight, bias;                                 // bias: an index
  int out, out_row, out_pixel;                      // bytes per row and pixel
  int residual, residual_from;                      // 0: none, 1: stem, 2: arena
  int relu, parts, part, share;                     // share: units that a part adds
  // planar: units are channel-major. mean: -1 for none.
  int scratch, planar, mean;
  int unused[PADDING];
};

struct Network {
  const int* items;  // [CTAs][MAX_ITEMS] of Item
  const int* counts;
  const unsigned char* weights;
  const float* biases;
  const unsigned char* stem;
  unsigned char* arena;  // two halves
  unsigned char* logits;
  unsigned* epochs;  // runs so far, for each CTA
  unsigned* trouble;
  unsigned long long* stamps;
  int half_bytes, features;
};

constexpr int TABLE_BYTES = MAX_ITEMS * (int)sizeof(Item);
constexpr int SUMS_AT = (TABLE_BYTES + 127) / 128 * 128;
constexpr int MEANS_AT = SUMS_AT + WARPS * SUMS_BYTES;
constexpr int RING_AT = MEANS_AT + MEANS_BYTES;
constexpr int INPUT_AT = RING_AT + STAGES * SLOT_BYTES;
static_assert(RING_AT % 128 == 0 && INPUT_AT % 128 == 0, "rows of ldmatrix are aligned");

__device__ __forceinline__ bool arrived(const uint4& v) {
  return max(max(v.x, v.y), max(v.z, v.w)) != UNWRITTEN;
}
__device__ __forceinline__ bool arrived(const uint2& v) { return max(v.x, v.y) != UNWRITTEN; }

// Counts a thread's polls and gives up after PATIENCE, so that a mistake does not hang the card.
struct Patience {
  unsigned* trouble;
  unsigned polls;
  __device__ __forceinline__ bool lasts(int where) {
    pause();
    if (++polls < PATIENCE) return true;
    if (polls == PATIENCE) {
      trouble[1] = blockIdx.x, trouble[2] = where, trouble[3] = threadIdx.x;
      trouble[0] = 1;
    }
    return false;
  }
};

#if STAMPS
#define STAMP(point, who)                                                                  \
  if (threadIdx.x == (who))                                                                \
    net.stamps[((size_t)blockIdx.x * (MAX_ITEMS + 1) + n) * STAMPS_OF_ITEM + (point)] =     \
        nanoseconds()
#else
#define STAMP(point, who)
#endif

// Starts to copy the weights that this thread reads of item n.
__device__ __forceinline__ void prefetch(const Network& net, int count, int n) {
  if (n < count) {
    const Item* items = reinterpret_cast<const Item*>(shared_bytes);
    const int chunks = items[n].chunks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = (warp * chunks * 32 + lane) * 16;
    const unsigned char* from = net.weights + items[n].weight + first;
    const unsigned to = shared_start() + RING_AT + n % STAGES * SLOT_BYTES + first;
    if (chunks == TAPS) {
#pragma unroll
      for (int i = 0; i < TAPS; ++i) cp_async<16>(to + i * 512, from + i * 512, true);
    } else {
#pragma unroll 1
      for (int i = 0; i < chunks; ++i) cp_async<16>(to + i * 512, from + i * 512, true);
    }
  }
  cp_async_commit();
}

// Loads the region under an item's windows as soon as it is written, CHUNKS × 16 bytes a thread.
template <int CHUNKS>
__device__ __forceinline__ void load_region(const Item& item, const unsigned char* source,
                                            Patience& patience, int n) {
  const int total = item.region << item.shift, mask = (1 << item.shift) - 1;
  // Where a chunk comes from and goes to, in chunks: 13 low bits are the place in shared memory.
  unsigned places[CHUNKS], waiting = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int i = threadIdx.x + c * THREADS, pixel = i >> item.shift, chunk = i & mask;
    const int row = pixel * item.magic >> 16, column = pixel - row * item.columns;
    const int y = item.y + row * item.step, x = item.x + column * item.step;
    const int place = item.half ? (column & 1) * item.half + (column >> 1) : column;
    const unsigned to = row * item.row_pitch + place * item.pitch + chunk * 16;
    const bool inside =
        (unsigned)y < (unsigned)item.height && (unsigned)x < (unsigned)item.width;
    places[c] = ((y * item.width + x) * item.pixel / 16 + chunk) << 13 | to / 16;
    waiting |= (unsigned)(i < total && inside) << c;
    if (i < total && !inside) store_shared(INPUT_AT + to, make_uint4(0, 0, 0, 0));
  }
  const unsigned wanted = waiting;
  uint4 value[CHUNKS] = {};
  // The first chunk that a thread waits for stands for the rest while they are far from written:
  // polling everything would take the bandwidth of the CTAs that still work.
#pragma unroll 1
  for (int round = 0; waiting; ++round) {
    if (round >= PROBE && (waiting & 1)) {
#pragma unroll 1
      do {
        nap();
        value[0] = load_relaxed(source + (places[0] >> 13) * 16);
      } while (!arrived(value[0]) && patience.lasts(n));
      waiting &= ~1u;
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      load_relaxed_if(value[c], source + (places[c] >> 13) * 16, waiting >> c & 1);
    }
    waiting = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) waiting |= (unsigned)!arrived(value[c]) << c;
    if (waiting && !patience.lasts(n)) break;
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    if (wanted >> c & 1) store_shared(INPUT_AT + (places[c] & 8191) * 16, value[c]);
  }
}

// A step: 16 channels by 56 pixels over 16 input channels of one tap.
__device__ __forceinline__ void multiply_tap(float (&sum)[TILES][4], const uint4& weight,
                                             const unsigned (&pixel)[4], unsigned tap) {
#pragma unroll
  for (int j = 0; j < TILES / 2; ++j) {
    unsigned b[4];
    load_matrices(b, pixel[j] + tap);
    multiply(sum[2 * j], weight, b[0], b[1]);
    multiply(sum[2 * j + 1], weight, b[2], b[3]);
  }
  unsigned low, high;
  load_two_matrices(low, high, pixel[3] + tap);
  multiply(sum[TILES - 1], weight, low, high);
}

// Four output channels of one pixel.
struct Unit {
  int at;       // its number in the item; −1 beyond the last, or if it is not a pixel
  int pixel, group;
  int out;      // bytes from the tile's first output
  bool own;     // whether this item adds its parts
  float4 bias;
  uint2 residual;
};

__device__ __forceinline__ float4 floats_at(const float* at) {
  return *reinterpret_cast<const float4*>(at);
}

__device__ __forceinline__ Unit unit_of(const Item& item, int k, const float* biases,
                                        const unsigned char* residual) {
  Unit u = {};
  u.at = threadIdx.x + k * THREADS;
  if (item.planar) {
    u.group = u.at / PIXELS, u.pixel = u.at % PIXELS;
  } else {
    const int bits = item.halves + 1;  // 4 groups of a pixel, or 8
    u.group = u.at & ((1 << bits) - 1), u.pixel = u.at >> bits;
  }
  if (u.at >= item.halves * UNITS || u.pixel >= item.pixels) u.at = -1;
  const int row = u.pixel * item.tile_magic >> 16, column = u.pixel - row * item.tile_columns;
  u.out = row * item.out_row + column * item.out_pixel + u.group * 8;
  u.own = u.at >= 0 && (unsigned)(u.at - item.part * item.share) < (unsigned)item.share;
  u.bias = make_float4(0, 0, 0, 0);
  u.residual = make_uint2(0, 0);
  if (u.own) {
    u.bias = floats_at(biases + item.bias + u.group * 4);
    if (item.residual_from) u.residual = load_relaxed_pair(residual + item.residual + u.out);
  }
  return u;
}

__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 as_floats(const uint4& v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}
__device__ __forceinline__ uint4 as_bits(const float4& v) {
  return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                    __float_as_uint(v.w));
}

// The sum of a unit over the CTA's warps, in a fixed order.
__device__ __forceinline__ float4 sum_of(const Item& item, const Unit& u) {
  const int warps = WARPS / item.halves;
  const int first = SUMS_AT + (u.group >> 2) * warps * SUMS_BYTES + u.pixel * SUM_PITCH +
                    (u.group & 3) * 16;
  float4 sum = load_shared<float4>(first);
#pragma unroll
  for (int w = 1; w < WARPS / 2; ++w) sum = plus(sum, load_shared<float4>(first + w * SUMS_BYTES));
  if (item.halves == 1) {
#pragma unroll
    for (int w = WARPS / 2; w < WARPS; ++w) {
      sum = plus(sum, load_shared<float4>(first + w * SUMS_BYTES));
    }
  }
  return sum;
}

// The sum of a unit over the items that share its tile, in a fixed order.
__device__ __forceinline__ float4 sum_of_parts(const Item& item, const Unit& u, const float4& own,
                                               const unsigned char* scratch, Patience& patience,
                                               int n) {
  const int stride = item.halves * UNITS * 16;
  const unsigned char* first = scratch + u.at * 16;
  uint4 part[MOST_PARTS] = {};
  unsigned waiting = ((1u << item.parts) - 1) & ~(1u << item.part);
#pragma unroll 1
  while (waiting) {
#pragma unroll
    for (int q = 0; q < MOST_PARTS; ++q) {
      load_relaxed_if(part[q], first + q * stride, waiting >> q & 1);
    }
    waiting = 0;
#pragma unroll
    for (int q = 0; q < MOST_PARTS; ++q) waiting |= (unsigned)!arrived(part[q]) << q;
    if (waiting && !patience.lasts(1000 + n)) break;
  }
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int q = 0; q < MOST_PARTS; ++q) {
    if (q < item.parts) sum = plus(sum, q == item.part ? own : as_floats(part[q]));
  }
  return sum;
}

__device__ __forceinline__ void convolve(const Network& net, const Item& item, int count, int n,
                                         unsigned char* half, Patience& patience) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = WARPS / item.halves;  // that divide the slice of channels

  STAMP(0, 0);
  uint4 weight[TAPS];
  cp_async_wait<STAGES - 1>();
  const int slot = RING_AT + n % STAGES * SLOT_BYTES + (warp * item.chunks * 32 + lane) * 16;
  weight[0] = load_shared<uint4>(slot);
  if (item.taps == TAPS) {
#pragma unroll
    for (int i = 1; i < TAPS; ++i) weight[i] = load_shared<uint4>(slot + i * 512);
  }

  const unsigned char* residual = item.residual_from == 1 ? net.stem : half;
  Unit unit[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) unit[k] = unit_of(item, k, net.biases, residual);

  // Addresses of ldmatrix: lane i has row i % 8 of matrix i / 8, which are the low and high
  // channels of pixels 0 to 7, then of pixels 8 to 15.
  unsigned pixel[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int p = min(j * 16 + (lane >> 4) * 8 + lane % 8, item.pixels - 1);
    const int row = p * item.tile_magic >> 16, column = p - row * item.tile_columns;
    pixel[j] = shared_start() + INPUT_AT + row * item.tile_row + column * item.pitch +
               warp % warps * 32 + (lane >> 3 & 1) * 16;
  }

  const unsigned char* source = (item.from_stem ? net.stem : half) + item.source;
  if (item.region << item.shift <= FEW * THREADS) {
    load_region<FEW>(item, source, patience, n);
  } else {
    load_region<MANY>(item, source, patience, n);
  }
  STAMP(1, 0);
  __syncthreads();
  STAMP(2, 0);
  prefetch(net, count, n + STAGES);

  float sum[TILES][4] = {};
  if (item.taps == TAPS) {
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
      const int column = t % 3 == 0 ? 0 : t % 3 == 1 ? item.tap1 : item.tap2;
      multiply_tap(sum, weight[t], pixel, t / 3 * item.row_pitch + column);
    }
  } else {
    multiply_tap(sum, weight[0], pixel, 0);
  }
  const int own = SUMS_AT + warp * SUMS_BYTES + lane % 4 * 2 * SUM_PITCH + lane / 4 * 4;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_shared(own + (j * 8 + i % 2) * SUM_PITCH + i / 2 * 32, sum[j][i]);
    }
  }
  __syncthreads();
  STAMP(3, 0);

  unsigned char* scratch = half + item.scratch;
  float4 total[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (unit[k].at < 0) continue;
    total[k] = sum_of(item, unit[k]);
    if (!unit[k].own) {
      const int place = item.part * item.halves * UNITS + unit[k].at;
      store_relaxed(scratch + place * 16, as_bits(total[k]));
    }
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const Unit& u = unit[k];
    if (!u.own) continue;
    float4 v = item.parts > 1 ? sum_of_parts(item, u, total[k], scratch, patience, n) : total[k];
    v = plus(v, u.bias);
    if (item.residual_from) {
      uint2 r = u.residual;
      while (!arrived(r) && patience.lasts(2000 + n)) {
        r = load_relaxed_pair(residual + item.residual + u.out);
      }
      const float2 low = floats_of(r.x), high = floats_of(r.y);
      v = plus(v, make_float4(low.x, low.y, high.x, high.y));
    }
    if (item.relu) {  // keeps NaN
      v.x = v.x < 0 ? 0 : v.x, v.y = v.y < 0 ? 0 : v.y;
      v.z = v.z < 0 ? 0 : v.z, v.w = v.w < 0 ? 0 : v.w;
    }
    const uint2 stored = make_uint2(halves_of(v.x, v.y), halves_of(v.z, v.w));
    if (item.mean < 0) {
      store_relaxed(half + item.out + u.out, stored);
    } else {
      const float2 low = floats_of(stored.x), high = floats_of(stored.y);
      store_shared(MEANS_AT + u.pixel * 16, make_float4(low.x, low.y, high.x, high.y));
    }
  }
  STAMP(4, item.part * item.share % THREADS);
  if (item.mean >= 0) {  // of the four channels whose pixels are all here
    __syncthreads();
    if (warp == 0) {
      float mean = 0;
      for (int p = lane / 4; p < item.pixels; p += 8) {
        mean += load_shared<float>(MEANS_AT + p * 16 + lane % 4 * 4);
      }
      mean = butterfly(butterfly(butterfly(mean, 4), 8), 16) / item.pixels;
      if (lane < 4) {
        store_relaxed(half + item.mean + item.part * 16 + lane * 4, __float_as_uint(mean));
      }
    }
  }
}

// Eight features of the classifier, a warp each.
__device__ __forceinline__ void classify(const Network& net, const Item& item, int count, int n,
                                         unsigned char* half, Patience& patience) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, feature = item.out + warp;
  STAMP(0, 0);
  cp_async_wait<STAGES - 1>();
  const int slot = RING_AT + n % STAGES * SLOT_BYTES + (warp * 64 + lane) * 16;
  const uint4 weight[2] = {load_shared<uint4>(slot), load_shared<uint4>(slot + 512)};
  const float bias = net.biases[item.bias + warp];
  const unsigned char* means = half + item.source + lane * 32;
  uint4 mean[4];
  bool waiting = true;
  while (waiting) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mean[i] = load_relaxed(means + i / 2 * 1024 + i % 2 * 16);
    waiting = !(arrived(mean[0]) && arrived(mean[1]) && arrived(mean[2]) && arrived(mean[3]));
    if (waiting && !patience.lasts(3000 + n)) break;
  }
  STAMP(1, 0);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned halves[4] = {weight[i].x, weight[i].y, weight[i].z, weight[i].w};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 m = as_floats(mean[i * 2 + j]);
      const float2 low = floats_of(halves[j * 2]), high = floats_of(halves[j * 2 + 1]);
      sum += low.x * m.x + low.y * m.y + high.x * m.z + high.y * m.w;
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum = butterfly(sum, distance);
  if (lane == 0 && feature < net.features) store_half(net.logits + feature * 2, sum + bias);
  prefetch(net, count, n + STAGES);
  STAMP(4, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) megakernel(const Network net) {
  const int count = net.counts[blockIdx.x];
  const unsigned epoch = net.epochs[blockIdx.x];
  const int* table = net.items + (size_t)blockIdx.x * TABLE_BYTES / 4;
  for (int i = threadIdx.x; i < count * (int)sizeof(Item) / 4; i += THREADS) {
    store_shared(i * 4, table[i]);
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < STAGES; ++n) prefetch(net, count, n);

  unsigned char* half = net.arena + (size_t)(epoch & 1) * net.half_bytes;
  unsigned char* other = net.arena + (size_t)(~epoch & 1) * net.half_bytes;
  const uint4 unwritten = make_uint4(UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < net.half_bytes / 16;
       i += gridDim.x * THREADS) {
    *reinterpret_cast<uint4*>(other + (size_t)i * 16) = unwritten;
  }
  Patience patience = {net.trouble, 0};
  int n = MAX_ITEMS;
  STAMP(0, 0);
  wait_for_previous_launch();
  STAMP(1, 0);
#pragma unroll 1
  for (n = 0; n < count; ++n) {
    const Item item = reinterpret_cast<const Item*>(shared_bytes)[n];
    if (item.kind == 0) {
      convolve(net, item, count, n, half, patience);
    } else {
      classify(net, item, count, n, half, patience);
    }
  }
  if (threadIdx.x == 0) net.epochs[blockIdx.x] = epoch + 1;
  n = MAX_ITEMS;
  STAMP(2, 0);
}
