"""Choices: a kernel that chooses among functions by a problem's size, restricted to one of them.

A large tile, such as 128 by 192 outputs, would only be chosen for batches that no profile has.
Each choice is therefore verified separately, on small problems with sizes on both sides of its
tile's.

A kernel with many tiles may then have more than a thousand problems. Its own, those of its choices
and those of the network do not depend on each other, so where workers would wait, its campaign is
divided into parts that run in several processes (`divided`, `Part`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from r18.backend import Backend, Kernel
from r18.graph.ops import Problem, Shape
from r18.graph.precision import PRECISIONS
from r18_oracle.generate.corners import corners, many_tiles, vast
from r18_oracle.generate.crossings import choice_crossings, crossings
from r18_oracle.generate.rounds import rounds
from r18_oracle.generate.sizes import takes
from r18_oracle.ops.table import spec_of

if TYPE_CHECKING:
    from r18_oracle.search.profiles import Profile

SHARE = 5
"""A choice gets this fraction of its kernel's examples, plus one, since the first is trivial."""


@dataclass(frozen=True)
class Share:
    """The problems for a kernel, or for one of its choices.

    one: the kernel or the choice. how, seed: for the drawn problems. common: the edges that all
    choices have; None for the kernel itself. twins: the kernels that differ from this one in their
    precision only, itself included.
    """

    one: Kernel
    how: Profile
    seed: int
    common: frozenset[int] | None = None
    twins: tuple[Kernel, ...] = ()

    @property
    def known(self) -> tuple[Problem, ...]:
        """The fixed problems.

        A kernel gets its op's corners and its crossings; with twins, of the corners those with many
        tiles and a part of the others. A choice gets crossings at the edges that not all choices
        have, and many tiles. A kernel's own `extra_problems` are among them in every profile.
        """
        op, limits = self.one.op, (self.how.max_elements, self.how.max_macs)
        if self.common is None:
            among = max(1, min(self.how.twins, len(self.twins)))
            place = next((i for i, one in enumerate(self.twins) if one.id == self.one.id), 0)
            tiles = self._plain_ones(many_tiles(op, *limits))
            rest = [p for p in self._plain_ones(corners(op, *limits)) if p not in tiles]
            shared = rest[self._first(among, place) :: among]
            found = (*shared, *tiles, *crossings(self.one, *limits))
        else:
            found = (*choice_crossings(self.one, self.common, *limits), *many_tiles(op, *limits))
        some = found[self._first(self.how.every) :: self.how.every]
        return (*some, *(extra for extra in self.one.extra_problems if extra not in some))

    def _plain_ones(self, found: Iterable[Problem]) -> tuple[Problem, ...]:
        """An op's corners; for a kernel that fuses nothing, without what they fuse."""
        return tuple(dict.fromkeys(map(self._plain, found)))

    def _plain(self, problem: Problem) -> Problem:
        if takes(self.one, problem):
            return problem
        fewer = spec_of(problem.op).plainer(problem)
        return next((p for p in fewer if takes(self.one, p)), problem)

    def of_network(self, every: Iterable[Problem]) -> Iterator[tuple[int, Problem]]:
        """The network's problems for the kernel, each with its place among all of them.

        Every geometry is among them. Problems with the same shapes differ in their epilogue or in
        the bits of their weights. The kernel gets every n-th of those that it takes, from another
        one on in each geometry, and all that it refuses.
        """
        geometries: dict[object, list[tuple[int, Problem]]] = {}
        for place, problem in enumerate(every):
            if type(problem.op) is not self.one.op:
                continue
            if self.how.alike == 1 or not takes(self.one, problem):
                yield place, problem
            else:
                geometries.setdefault(geometry(problem), []).append((place, problem))
        for turn, alike in enumerate(geometries.values()):
            first = (self._first(self.how.alike) + turn) % self.how.alike
            yield from alike[first :: self.how.alike] or [alike[first % len(alike)]]

    def _first(self, every: int, turn: int | None = None) -> int:
        """Where every n-th problem begins. It is another one for each precision of a kernel, so
        that the precisions, which share most of their code, share all problems among them.

        turn: what tells them apart; by default the precision's place among all.
        """
        if turn is None:
            name, of = self.one.precision.name, [*PRECISIONS]
            turn = of.index(name) if name in of else 0
        return (zlib.crc32(_family(self.one).encode()) + turn + self.seed) % every

    @property
    def rounds(self) -> tuple[Problem, ...]:
        """Problems beyond the limit of the workspace, which may be large."""
        return rounds(self.one, self.how.max_elements, self.how.max_macs)

    @property
    def vast(self) -> tuple[Problem, ...]:
        """Problems that are too large to run, to check refusals; none for a choice."""
        return vast(self.one.op) if self.common is None else ()


def _family(kernel: Kernel) -> str:
    """The kernel's id without its precision."""
    return kernel.id.replace(f"/{kernel.precision.name}", "")


def _twins(backend: Backend, kernel: Kernel) -> tuple[Kernel, ...]:
    """The kernels that differ from this one in their precision only, itself included."""
    family = (one for one in backend.kernels() if _family(one) == _family(kernel))
    return tuple(one for one in family if type(one) is type(kernel))


def geometry(problem: Problem) -> tuple[Shape, Shape, tuple[Shape, ...]]:
    """The shapes of the image, of the output and of the largest weight, if there is one."""
    weights = (weight.shape for weight in problem.op.weights())
    return problem.inputs[0], problem.output, tuple(sorted(weights, key=len)[-1:])


def shares(backend: Backend, kernel: Kernel, how: Profile, seed: int) -> Iterator[Share]:
    """The shares of the kernel and of its choices, which get fewer examples and their own seeds."""
    yield Share(kernel, how, seed, twins=_twins(backend, kernel))
    found = backend.variants(kernel)
    if not found:
        return
    common = frozenset.intersection(*(frozenset(one.edges) for one in found))
    fewer = replace(how, examples=how.examples // SHARE + 1)
    for index, choice in enumerate(found, 1):
        yield Share(choice, fewer, seed + index, common)


# -- parts of a campaign --------------------------------------------------------------------------

MOST_PARTS = 16
"""Each part finds out again what all have in common, such as the kernel's choices."""


def divided(kernels: int, workers: int) -> int:
    """The number of parts of each campaign: one if there is a kernel for every worker."""
    return max(1, min(MOST_PARTS, -(-workers // max(1, kernels))))


@dataclass(frozen=True)
class Part:
    """One of the `of` parts of a campaign; `nth` counts from 0.

    The first one has the kernel's own share, and with it the check `state`. Raises `ValueError` for
    a part that there is not.
    """

    nth: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.nth < self.of:
            raise ValueError(f"there is no part {self.nth} of {self.of}; parts count from 0")

    def shares(self, count: int) -> range:
        """The places of its shares, which follow those of the part before."""
        first, end = (-(-count * nth // self.of) for nth in (self.nth, self.nth + 1))
        return range(first, end)

    @property
    def problems(self) -> slice:
        """Its problems of the network: every `of`-th, so that each part has some of every layer."""
        return slice(self.nth, None, self.of)


WHOLE = Part()
