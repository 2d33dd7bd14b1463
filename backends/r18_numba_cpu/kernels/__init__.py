"""The code that Numba compiles. Only these modules import Numba (`arguments` does not).

`arguments`      the structured arguments that the host passes
`jit`            compiler options and the cache on disk
`vector`         vectors of float32 as a Numba type
`micro_kernel`   a register tile of a matrix product
`implicit_gemm`, `winograd`   the convolutions
`conv_maxpool`   what a worker does of a convolution with max pooling, in every format
`maxpool`        max pooling of every format
`others`         every other op
`bfloat16/`      ops in bfloat16
`integers/`      quantised ops

Loops over outputs are Python code. `vector` and `micro_kernel` decide what registers hold.
"""
