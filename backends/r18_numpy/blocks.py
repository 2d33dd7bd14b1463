"""How an output is cut into blocks, which workers take one after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

from r18.graph.ops import Conv2d, Problem

# The columns of a block are about this size: small enough for the last-level cache to hold those
# of a block a core, large enough for Python's share of the work on each not to be felt.
BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True)
class Block:
    """What one worker of im2col makes at a time: some channels of some rows of some images."""

    images: slice
    channels: slice
    rows: slice


def blocks_of(problem: Problem, extents: tuple[int, int, int]) -> tuple[Block, ...]:
    """The output of a convolution, cut into blocks of at most (images, channels, rows)."""
    cuts = map(cut, problem.output, extents)
    return tuple(Block(*slices) for slices in product(*cuts))


def cut(extent: int, size: int) -> list[slice]:
    """[0, extent) in slices of `size`, the last of what is left."""
    return [slice(*pair) for pair in pairwise([*range(0, extent, size), extent])]


def block_extents(problem: Problem, itemsize: int, workers: int) -> tuple[int, int, int]:
    """(images, channels, rows) of a block. It decides how fast, never what, is computed.

    Small images are taken several at a time, so that the product has enough columns; large ones
    in bands of rows, so that the columns stay in the cache. Where that leaves workers without a
    block, the larger operand of the product is shared out: rows of the image, or else output
    channels, for which each worker then unfolds the same, smaller, columns.
    """
    op = problem.op
    assert isinstance(op, Conv2d)
    n, channels, oh, ow = problem.output
    fitting = BLOCK_NBYTES // (op.depth * itemsize)  # columns in a block
    bands = ceil_div(oh, max(1, fitting // ow))
    if n * bands < workers and oh * ow > channels:
        bands = min(oh, workers)
    images = max(1, min(fitting // (oh * ow), ceil_div(n, workers)))
    slices = ceil_div(workers, ceil_div(n, images) * bands)
    return images, ceil_div(channels, slices), ceil_div(oh, bands)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
