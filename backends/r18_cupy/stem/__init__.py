"""Convolutions of images with few channels, optionally fused with their max-pooling.

The host side of kernels/stem; each module has its kernel's stem.
"""
