"""Every op that is not a convolution.

The host side of kernels/ops; each module has its kernel's stem.
"""
