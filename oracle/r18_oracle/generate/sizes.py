"""Sizes of drawn problems: small, odd, prime, and around a kernel's edges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from r18.backend import Kernel
from r18.graph.ops import Problem

ODD = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 31, 33)
"""Sizes that every kernel is tried with."""

MULTIPLES = (1, 4, 8, 16, 32, 64)
"""Numbers that a kernel may require channels to be a multiple of."""

UNDECLARED = (67, 131, 257, 521)
"""Sizes that a kernel is tried with on each axis whatever its edges are: one beyond a multiple of
64 or 128 that it does not know to be an edge, or wider than any image of the network."""

GRID = 65_535
"""The most blocks that a CUDA grid has along y and along z. A kernel with one block per channel,
say, either refuses more channels or loops over the rest."""

BEYOND_GRID = GRID + 2

BEYOND_INDEX = 2**31
"""The first index that a signed integer of 32 bits does not hold."""


@dataclass(frozen=True)
class Sizes:
    """Sizes to draw from.

    every: all of them, ascending. near: those next to a kernel's edges, drawn more often.
    """

    every: tuple[int, ...]
    near: tuple[int, ...] = ()

    @classmethod
    def of(cls, kernel: Kernel) -> Sizes:
        near = sorted({e + d for e in kernel.edges for d in (-1, 0, 1) if e + d >= 1})
        return cls(tuple(sorted({*near, *ODD})), tuple(near))

    def also(self, *more: int) -> Sizes:
        return Sizes(tuple(sorted({*self.every, *more})), self.near)

    def upto(self, most: int, *, edge: bool = False) -> st.SearchStrategy[int]:
        """A size of at most `most`.

        If a size near an edge fits, every second draw is one; with `edge`, every draw.
        """
        every = st.sampled_from([s for s in self.every if s <= most] or [1])
        fitting = [s for s in self.near if s <= most]
        if not fitting:
            return every
        near = st.sampled_from(fitting)
        return near if edge else every | near


BATCHES = Sizes((1, 2, 3, 5, 8))


@st.composite
def extents(
    draw: st.DrawFn, sizes: Mapping[str, Sizes], limits: Sequence[tuple[int, str]]
) -> dict[str, int]:
    """An extent for each axis (a letter) such that products stay within limits.

    limits: pairs (most, axes); the product over these axes is at most `most`. The axes are drawn
    in random order, the first of them near an edge, so that each axis is sometimes large and
    sometimes at an edge. Each leaves room for an extent of 3 on every axis still to come, so that
    few problems have an axis of 1.
    """
    found = dict.fromkeys(sizes, 1)
    order = draw(st.permutations(list(sizes)))
    for index, axis in enumerate(order):
        room = min(
            most // math.prod(found[a] if a in order[:index] else 3 for a in axes if a != axis)
            for most, axes in limits
            if axis in axes
        )
        found[axis] = draw(sizes[axis].upto(room, edge=index == 0))
    return found


@st.composite
def images(draw: st.DrawFn, sizes: Sizes, most: int) -> tuple[int, int, int, int]:
    """(N, C, H, W) of at most `most` elements."""
    axes = {"n": BATCHES, "c": sizes, "h": sizes, "w": sizes}
    drawn = draw(extents(axes, [(most, "nchw")]))
    return (drawn["n"], drawn["c"], drawn["h"], drawn["w"])


@st.composite
def any_shape(draw: st.DrawFn, sizes: Sizes, most: int) -> tuple[int, ...]:
    """(N, C, H, W), or (N, F) with F = C·H·W, of at most `most` elements."""
    shape = draw(images(sizes, most))
    return shape if draw(st.booleans()) else (shape[0], shape[1] * shape[2] * shape[3])


def along(size: int, *base: int, full: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """The base shape with each axis in turn set to `size`.

    full: two axes. Each of them then also has `size` while the other has one less.
    """
    for axis in range(len(base)):
        yield (*base[:axis], size, *base[axis + 1 :])
    for one, other in (full, full[::-1]):
        shape = [min(2, extent) for extent in base]
        shape[one], shape[other] = size - 1, size
        yield tuple(shape)


def along_images(size: int) -> Iterator[tuple[int, ...]]:
    """Shapes (N, C, H, W) with one axis of this size."""
    yield from along(size, 2, 2, 4, 3, full=(1, 3))


def along_flat(size: int) -> Iterator[tuple[int, ...]]:
    """Shapes (N, F) with one axis of this size."""
    yield from (*along(size, 2, 3, full=(0, 1)), (1, size))


def takes(kernel: Kernel, problem: Problem) -> bool:
    """Whether the kernel takes a problem. True if `refusal` raises; the check `runs` finds that."""
    try:
        return kernel.refusal(problem) is None
    except Exception:
        return True


FLAT = ((2, 3, 5, 7), (3, 1021), (1, 1))
"""Corner shapes of elementwise ops: 4-d, a long prime row, one element."""
