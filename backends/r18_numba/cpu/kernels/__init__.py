"""The code of the CPU kernels, compiled by Numba: these modules import it, and nothing else does.

Loops over outputs are in Python; what a register holds is said by `vector` and `product`.
"""
