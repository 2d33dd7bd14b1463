"""Facts of the device that tiles are chosen for, an H200, and of Hopper's blocks.

Another device computes the same with these choices, perhaps less evenly.
"""

from __future__ import annotations

MULTIPROCESSORS = 132

# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0.
SHARED_NBYTES = 227 * 1024  # a block's at most
MULTIPROCESSOR_NBYTES = 228 * 1024
RESERVED_NBYTES = 1024  # of a multiprocessor's, for each block, by the device

# Of a multiprocessor.
PRODUCT_BYTES_PER_CYCLE = 4096  # by wgmma: products times the bytes of one factor
SHARED_BYTES_PER_CYCLE = 128
