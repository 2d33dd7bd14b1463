"""Ops in bfloat16: the code that Numba compiles. Arrays are its bits, as uint16.

`pairs`         a register tile of a product, by `vdpbf16ps`
`epilogue`      the end of sums in float32: bias, residual, ReLU, one rounding
`implicit_gemm` convolution and linear, by `pairs`, `kernels.amx`, or float32's micro-kernel
`conv_maxpool`  convolution with max pooling
`others`        what `kernels.others` does not take from such arrays

`kernels.vector` widens bfloat16 when it loads them, and rounds when it stores: most of
`kernels.others` computes in float32 on them as it is.
"""
