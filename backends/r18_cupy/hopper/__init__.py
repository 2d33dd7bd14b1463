"""Convolutions and linear layers by TMA and `wgmma` (sm_90a).

The host side of kernels/hopper; each module has its kernel's stem.
"""
