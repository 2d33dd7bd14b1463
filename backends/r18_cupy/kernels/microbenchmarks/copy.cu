// A copy in device memory, for `r18 roofline --measure`: the grid sweeps over BLOCK_WORDS words a
// block, `repeats` times. Together they are more than any cache holds.
constexpr int THREADS = 1024, LOADS = 4, BLOCK_WORDS = 256 * 1024;
static_assert(BLOCK_WORDS % (THREADS * LOADS) == 0, "every thread copies as many words");

extern "C" __global__ void __launch_bounds__(THREADS)
copy_words(const uint4* __restrict__ source, uint4* __restrict__ target, const int repeats) {
  const size_t threads = size_t(gridDim.x) * THREADS, words = size_t(gridDim.x) * BLOCK_WORDS;
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll 1
    for (size_t i = blockIdx.x * THREADS + threadIdx.x; i < words; i += LOADS * threads) {
      uint4 held[LOADS];
#pragma unroll
      for (int j = 0; j < LOADS; ++j) held[j] = __ldcs(source + i + j * threads);
#pragma unroll
      for (int j = 0; j < LOADS; ++j) __stcs(target + i + j * threads, held[j]);
    }
  }
}
