"""Lifetimes to arena offsets: a pure function.

A value lives from the step that makes it to the last step that reads it. Two buffers may share
bytes only when no step needs both. Placement is greedy by size (Pisarchyk and Lee, "Efficient
memory management for deep neural net inference", arXiv:2001.03288, section 5.2): the largest
buffer first, each at the lowest offset at which it meets no placed buffer that lives with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from r18.errors import UsageError
from r18.graph.ops import MOST_BYTES


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `nbytes`, needed from step `first` through step `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", int(self.nbytes))  # NumPy's integers wrap in sums
        if self.nbytes < 0 or self.last < self.first:
            raise UsageError(f"not a lifetime: {self}")

    def meets(self, other: Lifetime) -> bool:
        """Whether some step needs both."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """Where each buffer begins in one allocation of `nbytes`."""

    offsets: Mapping[str, int]
    nbytes: int


def aligned(nbytes: int, alignment: int) -> int:
    """The least multiple of `alignment` that holds `nbytes`."""
    return -(-nbytes // alignment) * alignment


def plan_arena(
    lifetimes: Sequence[Lifetime], alignment: int, *, share: bool = True, by_size_nbytes: int = 0
) -> Arena:
    """Place every buffer at a multiple of `alignment`; with `share`, reuse bytes over time.

    by_size_nbytes: if the arena is no larger then, only buffers of the same size share bytes; see
    `Memory.by_size_nbytes`.

    Never larger than the sum of the aligned sizes, which is what `share=False` gives. Raises
    `UsageError` for a repeated name, an alignment below 1, or more bytes than a size can count.
    """
    if alignment < 1:
        raise UsageError(f"alignment must be at least 1, got {alignment}")
    if len({life.name for life in lifetimes}) != len(lifetimes):
        raise UsageError("two lifetimes have the same name")
    order = sorted(lifetimes, key=lambda life: (-life.nbytes, life.first, life.name))
    if not share:
        arena = _placed(lifetimes, alignment, lambda one, other: True)
    else:
        arena = _placed(order, alignment, _differ_or_meet if by_size_nbytes else Lifetime.meets)
        if arena.nbytes > by_size_nbytes > 0:
            arena = _placed(order, alignment, Lifetime.meets)
    if arena.nbytes > MOST_BYTES:
        raise UsageError(f"an arena of {arena.nbytes} bytes is too large: sizes end at 2⁶³ − 1")
    return arena


def _differ_or_meet(one: Lifetime, other: Lifetime) -> bool:
    return one.nbytes != other.nbytes or one.meets(other)


def _placed(
    order: Iterable[Lifetime], alignment: int, apart: Callable[[Lifetime, Lifetime], bool]
) -> Arena:
    """Each buffer at the lowest offset at which it overlaps none before it that must be apart."""
    offsets: dict[str, int] = {}
    placed: list[Lifetime] = []
    total = 0
    for life in order:
        size = aligned(life.nbytes, alignment)
        rivals = ((offsets[p.name], p) for p in placed if apart(p, life))
        spans = ((start, start + aligned(p.nbytes, alignment)) for start, p in rivals)
        offsets[life.name] = _lowest_gap(spans, size)
        placed.append(life)
        total = max(total, offsets[life.name] + size)
    return Arena(offsets, total)


def _lowest_gap(spans: Iterable[tuple[int, int]], size: int) -> int:
    """The lowest offset at which `size` bytes meet none of the spans [start, end)."""
    offset = 0
    for start, end in sorted(spans):
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset
