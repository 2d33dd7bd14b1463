"""Quantised ops, in plain int32 arithmetic, which the simulator runs as it is.

`requantize`     from a sum to a byte, with a rounding for each operation
`direct`, `implicit_gemm`   convolution
`linear`, `others`   every other op
"""
