// Thread block clusters: CTAs that are scheduled together and read each other's shared memory.
// sm_90 and later (PTX ISA, "barrier.cluster", "mapa").
#pragma once

// Cluster barrier over all threads of all CTAs, split into arrive and wait. Writes before the
// arrive are visible after the wait. Threads that have exited count as arrived.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives without ordering memory, so a thread that has written to global memory does not wait for
// those writes.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same shared memory address in CTA `rank` of the cluster.
__device__ __forceinline__ unsigned cluster_address(unsigned address, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ float4 cluster_load(unsigned address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
