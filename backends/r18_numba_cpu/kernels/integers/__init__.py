"""Quantised ops: the code that Numba compiles.

`bytes`         vectors of bytes as a Numba type
`requantize`    from an int32 sum to a byte, a vector at a time
`epilogue`      the same for all sums of a tile, from memory
`vnni`          a register tile of a product of bytes, by `vpdpbusd`
`portable`      the same by float32's micro-kernel, for CPUs without it
`implicit_gemm` convolution and linear, over any of these and `kernels.amx`
`others`        every other op
"""
