// megakernel.cu on a CPU: every thread of every CTA is a fiber, so that indices, barriers, polls
// and the end of the schedule can be tested without a GPU. Memory order cannot.
//
// g++ -O2 -std=c++17 -march=native -shared -fPIC -DMAX_ITEMS=... emulator.cpp
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EMULATED 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::max;
using std::min;

struct Int3 {
  int x;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned v) {
  float f;
  memcpy(&f, &v, 4);
  return f;
}
inline unsigned __float_as_uint(float v) {
  unsigned u;
  memcpy(&u, &v, 4);
  return u;
}

#pragma GCC diagnostic ignored "-Wunused-variable"
constexpr int LANES = 32, CTA_THREADS = 256, STACK = 48 * 1024, SHARED = 232448;

struct Copy {
  unsigned to;
  const void* from;
  int group;
};
enum Reason { RUNNING, WARP, CTA, POLL, DONE };
struct Warp {
  int arrivals = 0;
  float in[2][LANES][16];
};
struct Block {
  unsigned char* shared;
  int arrivals = 0;
  Warp warps[CTA_THREADS / LANES];
};
struct Fiber {
  void* sp = nullptr;
  Reason reason = RUNNING;
  Block* block;
  Warp* warp;
  int thread, cta, warp_phase = 0, cta_phase = 0, group = 0;
  std::vector<Copy> copies;
};
static Fiber* current;
static void* scheduler_sp;
static int ctas;
static long long polls;

#define threadIdx (Int3{current->thread})
#define blockIdx (Int3{current->cta})
#define gridDim (Int3{ctas})

extern "C" void switch_stacks(void** save, void* load);
asm(R"(
.text
.globl switch_stacks
switch_stacks:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret
)");
static __attribute__((noinline)) void yield(Reason reason) {
  Fiber* me = current;
  me->reason = reason;
  switch_stacks(&me->sp, scheduler_sp);
}

static void fail(const char* what) {
  fprintf(stderr, "emulator: %s (CTA %d, thread %d)\n", what, current->cta, current->thread);
  abort();
}
static unsigned char* shared_at(unsigned at, int bytes) {
  if (at % bytes || at + bytes > SHARED) fail("shared memory address");
  return current->block->shared + at;
}

inline void __syncthreads() {
  const int phase = ++current->cta_phase;
  ++current->block->arrivals;
  while (current->block->arrivals < phase * CTA_THREADS) yield(CTA);
}
// What all lanes of the warp bring, up to 16 floats.
static float (*exchange(const float* mine, int count))[16] {
  Warp& warp = *current->warp;
  const int phase = current->warp_phase++;
  float(*in)[16] = warp.in[phase % 2];
  memcpy(in[current->thread % LANES], mine, count * 4);
  ++warp.arrivals;
  while (warp.arrivals < (phase + 1) * LANES) yield(WARP);
  return in;
}

inline void pause() {
  ++polls;
  yield(POLL);
}
inline void nap() {}
inline unsigned long long nanoseconds() {  // as far from zero as a GPU's
  static unsigned long long now = 1ull << 60;
  return now += 32;
}
inline void wait_for_previous_launch() {}
inline unsigned shared_start() { return 0; }
#define shared_bytes (current->block->shared)

template <typename T>
inline T read(const void* at) {
  T v;
  memcpy(&v, at, sizeof v);
  return v;
}
inline uint4 load_relaxed(const void* at) { return read<uint4>(at); }
inline uint2 load_relaxed_pair(const void* at) { return read<uint2>(at); }
template <typename T>
inline void store_relaxed(void* at, const T& v) {
  memcpy(at, &v, sizeof v);
}
inline void load_relaxed_if(uint4& v, const void* at, bool wanted) {
  if (wanted) v = load_relaxed(at);
}
template <typename T>
inline T load_shared(int at) {
  return read<T>(shared_at(at, alignof(T) < 16 ? sizeof(T) : 16));
}
template <typename T>
inline void store_shared(int at, const T& v) {
  memcpy(shared_at(at, sizeof v), &v, sizeof v);
}

// A copy happens when it is waited for, as late as it may.
template <int BYTES>
inline void cp_async(unsigned to, const void* from, bool) {
  current->copies.push_back({to, from, current->group});
}
inline void cp_async_commit() { ++current->group; }
template <int PENDING>
inline void cp_async_wait() {
  auto& copies = current->copies;
  size_t done = 0;
  while (done < copies.size() && copies[done].group < current->group - PENDING) {
    memcpy(shared_at(copies[done].to, 16), copies[done].from, 16), ++done;
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

static float from_half(uint16_t v) { return _cvtsh_ss(v); }
inline float2 floats_of(unsigned halves) {
  return {from_half(halves & 0xffff), from_half(halves >> 16)};
}
inline unsigned halves_of(float low, float high) {
  return (unsigned)_cvtss_sh(low, 0) | (unsigned)_cvtss_sh(high, 0) << 16;
}
inline void store_half(void* at, float v) {
  const uint16_t half = _cvtss_sh(v, 0);
  memcpy(at, &half, 2);
}
inline float butterfly(float v, int distance) {
  float(*all)[16] = exchange(&v, 1);
  return v + all[(current->thread % LANES) ^ distance][0];
}
template <int MATRICES>
static void matrices(unsigned* fragment, unsigned address) {
  const float mine = __uint_as_float(address);
  float(*all)[16] = exchange(&mine, 1);
  const int lane = current->thread % LANES;
  for (int m = 0; m < MATRICES; ++m) {
    const unsigned row = __float_as_uint(all[m * 8 + lane / 4][0]);
    shared_at(row, 16);
    fragment[m] = read<unsigned>(shared_at(row + lane % 4 * 4, 4));
  }
}
inline void load_matrices(unsigned (&fragment)[4], unsigned address) {
  matrices<4>(fragment, address);
}
inline void load_two_matrices(unsigned& low, unsigned& high, unsigned address) {
  unsigned fragment[2];
  matrices<2>(fragment, address);
  low = fragment[0], high = fragment[1];
}
// mma.m16n8k16: PTX ISA, "Matrix Fragments for mma.m16n8k16".
inline void multiply(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
  const unsigned registers[6] = {a.x, a.y, a.z, a.w, b0, b1};
  float mine[12];
  for (int i = 0; i < 6; ++i) {
    const float2 both = floats_of(registers[i]);
    mine[2 * i] = both.x, mine[2 * i + 1] = both.y;
  }
  float(*all)[16] = exchange(mine, 12);
  const int group = current->thread % LANES / 4, quad = current->thread % 4;
  for (int i = 0; i < 4; ++i) {
    const int high_row = i / 2, column = quad * 2 + i % 2;
    float sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const float* row = all[group * 4 + k % 8 / 2];
      const float* col = all[column * 4 + k % 8 / 2];
      sum += row[(k / 8 * 2 + high_row) * 2 + k % 2] * col[8 + k / 8 * 2 + k % 2];
    }
    d[i] = sum;
  }
}

#include "megakernel.cu"

static Network network_;
static void start() {
  megakernel(network_);
  yield(DONE);
}

// Runs the kernel; seed: the order in which warps take turns. Returns the polls that found nothing,
// or −1 if nothing moved.
extern "C" long long emulate(const Network* net, int grid, unsigned seed) {
  network_ = *net;
  ctas = grid, polls = 0;
  if (INPUT_AT + INPUT_BYTES > SHARED) return -2;
  const size_t threads = (size_t)grid * CTA_THREADS;
  unsigned char* stacks = (unsigned char*)mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  std::vector<Block> blocks(grid);
  std::vector<Fiber> fibers(threads);
  for (int c = 0; c < grid; ++c) {
    blocks[c].shared = (unsigned char*)aligned_alloc(128, SHARED);
    memset(blocks[c].shared, 0xff, SHARED);
  }
  for (size_t i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.cta = i / CTA_THREADS, f.thread = i % CTA_THREADS;
    f.block = &blocks[f.cta], f.warp = &f.block->warps[f.thread / LANES];
    void** top = (void**)(stacks + (i + 1) * STACK);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = (void*)start;
    top -= 6;
    f.sp = top;
  }
  std::vector<int> order(threads / LANES);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  unsigned state = seed;
  long long result = 0;
  for (size_t left = threads; left;) {
    bool moved = false;
    for (size_t i = order.size(); seed && i > 1; --i) {
      state = state * 1664525u + 1013904223u;
      std::swap(order[i - 1], order[(state >> 8) % i]);
    }
    for (int w : order) {
      bool again = true;
      while (again) {
        Warp& warp = *fibers[w * LANES].warp;
        const int arrivals = warp.arrivals;
        for (int l = 0; l < LANES; ++l) {
          Fiber& f = fibers[w * LANES + (seed & 1 ? LANES - 1 - l : l)];
          if (f.reason == DONE) continue;
          const Reason before = f.reason;
          const int phase = f.cta_phase;
          current = &f;
          switch_stacks(&scheduler_sp, f.sp);
          if (f.reason == DONE) --left;
          if (f.reason != before || f.cta_phase != phase) moved = true;
        }
        again = warp.arrivals != arrivals;
        moved |= again;
      }
    }
    static int still;
    still = moved ? 0 : still + 1;
    if (still > 64) {
      result = -1;
      break;
    }
  }
  for (Block& b : blocks) free(b.shared);
  munmap(stacks, threads * STACK);
  return result ? result : polls;
}
