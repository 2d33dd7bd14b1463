"""Quantised ops: the code that Numba compiles.

`bytes`         vectors of bytes as a Numba type
`requantize`    from an int32 sum to a byte, a vector at a time
`vnni`          a register tile of a product of bytes, by `vpdpbusd`
`portable`      the same by float32's micro-kernel, for CPUs without it
`implicit_gemm` convolution and linear, over either of the two
`others`        every other op
"""
