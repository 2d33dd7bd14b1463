"""From a schedule to a run: fusing, choosing kernels, placing memory, launching, pipelining."""
