"""Quantised ops on the CPU, equal to the bit to every other backend's.

`packing`      weights as the micro-kernels read them
`tiles`        how AMX's tiles cover a band
`gemm`         convolution and linear: the cache blocking, arguments
`conv_maxpool` convolution with max pooling: the same
`winograd`     3×3 convolution by F(2×2, 3×3): the same
`others`       every other op; all kernels
"""

from __future__ import annotations

from r18_numba_cpu.integers.others import BY_AMX, BY_VNNI, BY_WORDS, fastest, integer_kernels

__all__ = ["BY_AMX", "BY_VNNI", "BY_WORDS", "fastest", "integer_kernels"]
