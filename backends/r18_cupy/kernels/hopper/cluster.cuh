// Thread block clusters: blocks that run side by side and read each other's shared memory. sm_90
// and later (PTX ISA, "barrier.cluster", "mapa").
#pragma once

// A meeting of every thread of every block of the cluster, in two halves: what was written before the
// first is seen after the second. Those that have ended count as arrived.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same, but of what was written before nothing more is known after: who has written to the
// device's memory does not wait until all of that has arrived there.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
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
