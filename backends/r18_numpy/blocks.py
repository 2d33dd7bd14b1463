"""Cache blocking: how an output is split into blocks, which workers take one after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

from r18.graph.ops import Conv2d, Problem

# The approximate size of a block's columns: small enough that the last-level cache holds one block
# per core, large enough that Python's overhead per block is negligible.
BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True)
class Block:
    """The part of a convolution that one worker of im2col computes at a time."""

    images: slice
    channels: slice
    rows: slice


def blocks_of(problem: Problem, extents: tuple[int, int, int]) -> tuple[Block, ...]:
    """The output of a convolution, split into blocks of at most (images, channels, rows)."""
    cuts = map(cut, problem.output, extents)
    return tuple(Block(*slices) for slices in product(*cuts))


def cut(extent: int, size: int) -> list[slice]:
    """[0, extent) in slices of `size`; the last may be smaller."""
    return [slice(*pair) for pair in pairwise([*range(0, extent, size), extent])]


def block_extents(problem: Problem, itemsize: int, workers: int) -> tuple[int, int, int]:
    """(images, channels, rows) of a block. They affect the speed only, never the result.

    A block has several small images, so that the product has enough columns, or a band of rows of
    a large image, so that the columns stay in the cache. If that gives fewer blocks than workers,
    the larger operand of the product is split: rows of the image, or output channels. In the second
    case each worker unfolds the same, smaller columns.
    """
    op = problem.op
    assert isinstance(op, Conv2d)
    n, channels, oh, ow = problem.output
    fitting = BLOCK_NBYTES // (op.groups * op.depth * itemsize)  # columns in a block
    bands = ceil_div(oh, max(1, fitting // ow))
    if n * bands < workers and oh * ow > channels:
        bands = min(oh, workers)
    images = max(1, min(fitting // (oh * ow), ceil_div(n, workers)))
    slices = ceil_div(workers, ceil_div(n, images) * bands)
    return images, ceil_div(channels, slices), ceil_div(oh, bands)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
