"""Quantised ops: the code that Numba compiles.

`bytes`         vectors of bytes as a Numba type
`requantize`    from an int32 sum to a byte, a vector at a time
`epilogue`      the same for all sums of a tile, from memory
`dots`          instructions that add products to the lanes of a register: VNNI's and AVX2's
`register_tile` a register tile of a product, by one of these
`portable`      the same by float32's micro-kernel, for CPUs without them
`words`         vectors of int16 and of int32 as Numba types
`winograd`      3×3 convolution by F(2×2, 3×3)
`bands`         copies of the padded image as products take it, quantised on the way
`implicit_gemm` convolution and linear, over any of these and `kernels.amx`
`conv_maxpool`  convolution with max pooling, from an image that may be quantised on the way
`others`        every other op
"""
