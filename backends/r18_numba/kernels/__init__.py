"""Device code. Its modules get `numba.cuda` from `r18_numba.target`: for a GPU, or the simulator.

Functions `build…(…)` compile a `__global__` function for a storage format and a tile. Variables of
the closure are constants to the compiler, so loops over them are unrolled and local arrays become
registers. Scalar arguments are 32-bit integers. Offsets are computed in 64 bits.
"""
