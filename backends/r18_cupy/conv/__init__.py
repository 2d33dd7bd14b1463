"""Convolutions that run on any architecture, and what all convolutions share.

The host side of kernels/conv; each module has its kernel's stem.
"""
