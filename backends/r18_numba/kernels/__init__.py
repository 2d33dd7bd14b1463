"""Device code. Import these modules through `r18_numba.target`, which chooses the simulator or not.

Each has functions `build…(…)` that compile a `__global__` function for a storage format and a
tile: what they close over are constants to the compiler, so that loops over them are unrolled and
local arrays become registers. Scalar arguments are 32-bit integers; offsets are computed in 64.
"""
