"""Rounds: a problem beyond the limit of a kernel's workspace, which the kernel computes in parts.

Such a kernel takes as much scratch as a problem needs, up to a limit. Larger problems go round
again, each round with its own part of the output, and the last part is smaller. No drawn problem is
as large as such a limit, and no kernel has to declare one. But `workspace` is pure: it says without
a device how much scratch any problem needs. Here a small problem grows until its workspace does not
grow with it, and the smallest such problem is run. Where each worker's scratch is limited, that is
when every worker has its share.
"""

from __future__ import annotations

from functools import cache

from r18.backend import Kernel
from r18.errors import R18Error
from r18.graph.ops import Problem
from r18_oracle.generate.corners import small_enough
from r18_oracle.generate.problems import fitted
from r18_oracle.generate.shrink import elements
from r18_oracle.generate.sizes import takes
from r18_oracle.ops.table import spec_of

MOST_ELEMENTS = 1 << 22
MOST_MACS = 1 << 29
"""Limits on a problem. A limit of 512 MiB is reached with fewer, as windows of many taps make much
scratch of a small image."""
TIMES = 1024
"""A problem may have this many times the elements and multiplications of a drawn one."""
AXES = "nh"
"""The axes that grow: the batch, and the height of an image where each image has its own rounds."""
MACS_OF_AN_ELEMENT = 64
"""How many multiplications take as long as drawing and judging an element."""


def rounds(kernel: Kernel, max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """The cheapest problem found that takes two to three rounds of the kernel's workspace, the last
    of them not full. None if the workspace has no limit, or one that only larger problems reach.

    max_elements, max_macs: the limits for drawn problems.
    """
    most, macs = min(MOST_ELEMENTS, TIMES * max_elements), min(MOST_MACS, TIMES * max_macs)
    spec = spec_of(kernel.op)
    bases = (fitted(kernel, problem, max_macs) for problem in spec.growing(kernel))
    found = (
        problem
        for base in dict.fromkeys(bases)
        for axis in AXES
        if axis in spec.numbers(base) and (problem := _beyond(kernel, base, axis, most)) is not None
    )
    return tuple(sorted(small_enough(found, most, macs), key=_cost)[:1])


def _cost(problem: Problem) -> float:
    return elements(problem) + problem.macs / MACS_OF_AN_ELEMENT


def _beyond(kernel: Kernel, base: Problem, axis: str, most: int) -> Problem | None:
    """The base with an extent at which the workspace has stopped growing, or None if that is not
    below `most` elements.

    Until there is more than one tile, scratch does not grow with the problem either: it must have
    grown before. From then on it doubles with the extent. An eighth of an extent that needs less
    than three times its scratch is at most two thirds of a limit, and at least a third unless the
    limit is a few tiles. So half of the extent takes two or three rounds.
    """
    spec, start = spec_of(base.op), spec_of(base.op).numbers(base)[axis]

    @cache  # an eighth of the next extents
    def at(extent: int) -> Problem | None:
        try:
            problem = spec.rebuild(base.op, spec.numbers(base) | {axis: extent})
        except R18Error:
            return None
        return problem if takes(kernel, problem) else None

    least, extent = _scratch(kernel, base), start
    while (here := at(extent)) is not None and elements(here) <= most:
        far, needed = at(8 * extent), _scratch(kernel, here)
        if far is None:
            return None
        if needed > least and _scratch(kernel, far) < 3 * needed:
            return at(4 * extent + 1)
        extent *= 2
    return None


def _scratch(kernel: Kernel, problem: Problem) -> int:
    """The workspace's bytes; 0 if `workspace` raises, which the check `runs` finds."""
    try:
        nbytes = kernel.workspace(problem)
    except Exception:
        return 0
    return nbytes if isinstance(nbytes, int) else 0
