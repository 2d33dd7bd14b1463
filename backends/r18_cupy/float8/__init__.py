"""Scaled ops on e4m3 numbers, by Hopper's `wgmma`, by `mma.sync`, and in plain float32.

`kernel` is what they share. See r18.graph.scaled for what they compute, which
kernels/float8/e4m3.cuh writes once for the device.
"""
