// Delays by a seed, for builds whose schedule is perturbed. `perturb.py` inserts the calls next to
// waits, arrivals, barriers, copies and dependent launch; the kernels' own sources have none.
//
// The host sets `r18_perturbation`, so one build serves every seed. It is zero when a module is
// loaded: nothing is delayed.
#pragma once

struct alignas(16) Perturbation {
  unsigned seed;
  unsigned kinds;        // a bit for each kind of site that is delayed
  unsigned mask;         // one draw in mask + 1 is a delay; a power of two less one
  unsigned nanoseconds;  // the longest delay
};

extern "C" {
__device__ Perturbation r18_perturbation;
}

// The finaliser of MurmurHash3: every bit of the result depends on every bit of `x`.
__device__ __forceinline__ unsigned r18_mixed(unsigned x) {
  x ^= x >> 16, x *= 0x85ebca6bu;
  x ^= x >> 13, x *= 0xc2b2ae35u;
  return x ^ x >> 16;
}

// The delay of a warp at a site, in nanoseconds; mostly 0. Either its whole CTA is late, or only
// the warp. All lanes of a warp draw alike, since some sites are instructions of the whole warp.
__device__ __forceinline__ unsigned r18_drawn(const Perturbation& of, unsigned kind, unsigned site,
                                              unsigned cta, unsigned warp, unsigned turn) {
  const unsigned key = r18_mixed(of.seed * 0x9e3779b9u ^ site) + turn;
  const unsigned all = r18_mixed(key ^ cta * 0x27d4eb2fu);
  const unsigned one = r18_mixed(all + warp * 0x165667b1u + 1);
  const bool late = (all & (2 * of.mask + 1)) == 0 | (one & of.mask) == 0;
  return (of.nanoseconds >> (one >> 30)) * (late & of.kinds >> kind & 1);
}

#ifdef __CUDACC_RTC__
__device__ __forceinline__ Perturbation r18_read() {
  Perturbation of;  // volatile: the host changes it between launches
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(of.seed), "=r"(of.kinds), "=r"(of.mask), "=r"(of.nanoseconds)
               : "l"(__cvta_generic_to_global(&r18_perturbation))
               : "memory");
  return of;
}

__device__ __forceinline__ unsigned r18_cta() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

// With an even seed a warp is late at a site on every visit. With an odd one it is late for some
// microseconds, then others are: what is drawn also depends on the device's clock.
__device__ __forceinline__ void r18_delay(unsigned kind, unsigned site) {
  const Perturbation of = r18_read();
  unsigned clock;
  asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(clock));
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned turn = of.seed % 2 ? clock >> 13 : 0;
  // No branch: the lanes must stay converged for the instruction at the site.
  asm volatile("nanosleep.u32 %0;" ::"r"(
                   r18_drawn(of, kind, site, r18_cta(), thread / 32, turn))
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// TMA stores put off until their thread waits for them. A store may read shared memory at any time
// before that; on a quiet device it does so at once. One thread of a warpgroup stores, and has a
// list of its own; one thread initialises the mbarriers, and with them all lists.
struct PostponedStores {
  static constexpr unsigned MOST = 8, LISTS = 3;
  unsigned count;
  unsigned source[MOST];
  int rank[MOST], coordinates[MOST][4];
  unsigned long long map[MOST];
};

__device__ __forceinline__ PostponedStores& r18_postponed_stores(unsigned list) {
  __shared__ PostponedStores stores[PostponedStores::LISTS];
  return stores[list];
}

__device__ __forceinline__ void r18_postpone_none() {
  for (unsigned i = 0; i < PostponedStores::LISTS; ++i) r18_postponed_stores(i).count = 0;
}

// Whether a store is put off: by the seed, in every second CTA.
__device__ __forceinline__ bool r18_postpone(unsigned kind, unsigned site, int rank,
                                             const void* map, int first, int second, int third,
                                             int fourth, unsigned source) {
  const Perturbation of = r18_read();
  if (threadIdx.x / 128 >= PostponedStores::LISTS) return false;
  PostponedStores& stores = r18_postponed_stores(threadIdx.x / 128);
  const unsigned at = stores.count;
  if (!(of.kinds >> kind & 1) || at == PostponedStores::MOST) return false;
  if (r18_mixed(of.seed * 0x9e3779b9u ^ site ^ r18_cta() * 0x27d4eb2fu) & 1) return false;
  int(&to)[4] = stores.coordinates[at];
  to[0] = first, to[1] = second, to[2] = third, to[3] = fourth;
  stores.rank[at] = rank, stores.source[at] = source;
  stores.map[at] = reinterpret_cast<unsigned long long>(map);
  stores.count = at + 1;
  return true;
}

// Issues and commits what was put off. Before the wait for the thread's stores.
__device__ __forceinline__ void r18_store_postponed() {
  if (threadIdx.x / 128 >= PostponedStores::LISTS) return;
  PostponedStores& stores = r18_postponed_stores(threadIdx.x / 128);
  const unsigned count = stores.count;
  if (count == 0) return;
  for (unsigned i = 0; i < count; ++i) {
    const int(&at)[4] = stores.coordinates[i];
    const unsigned long long map = stores.map[i];
    const unsigned source = stores.source[i];
    if (stores.rank[i] == 2) {
      asm volatile(
          "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
          "r"(at[0]), "r"(at[1]), "r"(source)
          : "memory");
    } else if (stores.rank[i] == 3) {
      asm volatile(
          "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
              map),
          "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(source)
          : "memory");
    } else {
      asm volatile(
          "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
          "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
          "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(source)
          : "memory");
    }
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  stores.count = 0;
}
#endif
#endif
