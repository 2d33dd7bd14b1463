"""Ops in bfloat16: packed weights, arguments and calls. See `kernels.bfloat16`.

`products`     convolution and linear
`conv_maxpool` convolution with max pooling
`others`       all kernels, and the calls of every other op
"""

from r18_numba_cpu.bfloat16.others import BY_AMX, BY_PAIRS, bfloat16_kernels, fastest

__all__ = ["BY_AMX", "BY_PAIRS", "bfloat16_kernels", "fastest"]
