"""How many of PyTorch's threads compute in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FEW_ELEMENTS = 1 << 17
"""Elements of inputs and weights up to which one thread computes. Where every core is busy, a
second one makes a convolution of 13 microseconds take 390."""


@contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """One thread while so few elements are computed on, as many as before afterwards."""
    threads = torch.get_num_threads()
    if elements > FEW_ELEMENTS or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


__all__ = ["FEW_ELEMENTS", "threads_for"]
