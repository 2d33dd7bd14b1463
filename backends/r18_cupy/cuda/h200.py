"""The hardware figures that tiles are chosen for: an H200.

Another device computes the same results with these choices, possibly with a worse balance.
"""

from __future__ import annotations

MULTIPROCESSORS = 132

# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0.
SHARED_NBYTES = 227 * 1024  # at most, per block
MULTIPROCESSOR_NBYTES = 228 * 1024
RESERVED_NBYTES = 1024  # reserved by the device for each resident block

# Per multiprocessor.
PRODUCT_BYTES_PER_CYCLE = 4096  # by wgmma: products times the bytes of one operand
SHARED_BYTES_PER_CYCLE = 128
