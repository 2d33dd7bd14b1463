"""Quantised ops on the CPU, equal to the bit to every other backend's.

`packing` weights as the micro-kernels read them
`gemm`    convolution and linear: the cache blocking, arguments
`others`  every other op; all kernels
"""

from __future__ import annotations

from r18_numba_cpu.integers.others import integer_kernels, without_vnni

__all__ = ["integer_kernels", "without_vnni"]
