"""Quantised ops on integer tensor cores and in plain int32, exact to the bit.

`kernel` is what they share, `stem_wgmma` the stem with its max-pooling. See r18.graph.quantized for
the arithmetic, which kernels/integers/requantize.cuh writes once for the device.
"""
