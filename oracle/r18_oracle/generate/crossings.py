"""Crossings: problems one beyond each size at which a kernel declares that it changes.

Drawn problems come near a kernel's `edges` on some axis, now and then. Here every edge is crossed
on every axis while all other axes are small, and on one axis while another is exactly full, since
a kernel that tiles both computes its grid from the number of full tiles. Where several sizes
together decide, the kernel itself names a problem beyond: its `extra_problems`. Profiles with room
for it also have sizes that no kernel declares, as a fault may be at an edge that it does not know.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from r18.backend import Kernel
from r18.graph.ops import Problem
from r18_oracle.generate.corners import small_enough
from r18_oracle.generate.problems import fitted
from r18_oracle.generate.sizes import UNDECLARED
from r18_oracle.ops.table import spec_of


def crossings(kernel: Kernel, max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """Problems one beyond the kernel's edges on each axis, those that are not too large.

    A problem that the kernel refuses is rounded up to one that it takes, if there is one. Two axes
    at an edge may make a tensor twice as large as the limit. `UNDECLARED` sizes are crossed up to a
    400th of the limit on elements. The kernel's own extra problems come last, at any size.
    """
    room = spec_of(kernel.op).room(kernel, max_elements, max_macs)
    undeclared = [size - 1 for size in UNDECLARED if size <= max_elements // 400]
    found = _crossed(kernel, dict.fromkeys((*kernel.edges, *undeclared)), *room)
    return (*found, *(extra for extra in kernel.extra_problems if extra not in found))


def choice_crossings(
    choice: Kernel, common: Container[int], max_elements: int, max_macs: int
) -> tuple[Problem, ...]:
    """Problems beyond a choice's largest edge, and beyond the edges that not all choices of its
    kernel share. Some ops add larger ones (`OpSpec.beyond`). The choice's own extra problems come
    last, at any size."""
    own = [edge for edge in choice.edges if edge not in common or edge == max(choice.edges)]
    spec = spec_of(choice.op)
    near = _crossed(choice, own, *spec.room_of_choice(choice, max_elements, max_macs))
    fitting = (fitted(choice, problem, 4 * max_macs) for problem in spec.beyond(choice))
    large = small_enough(fitting, 20 * max_elements, 4 * max_macs)
    return tuple(dict.fromkeys((*near, *large, *choice.extra_problems)))


def _crossed(
    kernel: Kernel, edges: Iterable[int], max_elements: int, max_macs: int
) -> tuple[Problem, ...]:
    spec = spec_of(kernel.op)
    every = (problem for edge in edges for problem in spec.crossings(kernel, edge + 1))
    near = (fitted(kernel, problem, max_macs) for problem in every)
    return tuple(dict.fromkeys(small_enough(near, 2 * max_elements, max_macs)))
