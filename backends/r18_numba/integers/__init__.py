"""Quantised ops, exact to the bit: refusals, packed weights, launches.

`kernel` what they share; `conv`, `linear`, `others` the kernels

They are modules of their own so that a kernel's digest counts only what it is made of.
"""
