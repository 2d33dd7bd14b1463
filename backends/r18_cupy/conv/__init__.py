"""Convolutions that run on any architecture, and the base of all convolutions.

The host side of kernels/conv; each module has its kernel's stem.
"""
