"""Shrinking a problem that fails: smaller problems, the boldest first, until none fails.

Hypothesis cannot shrink what it has not drawn: corners, crossings, problems of the network, and
those that ended a worker process. Its smallest drawn problem is smallest only in its own order, so
that is shrunk here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from r18.errors import ShapeError
from r18.graph.ops import Problem
from r18_oracle.ops.spec import FLAGS, FORMATS, Numbers
from r18_oracle.ops.table import spec_of

FROM_ZERO = (
    *("padding_h", "padding_w", "pool_padding_h", "pool_padding_w"),
    *("projection_padding_h", "projection_padding_w", "projection_bias"),
    *("projection_slack_h", "projection_slack_w"),
    *(*FLAGS, *FORMATS),
)
"""The numbers that may be 0; all others are at least 1."""


def shrunk(
    problem: Problem, fails: Callable[[Problem], bool], enough: Callable[[], bool]
) -> Problem:
    """The smallest failing problem found, starting from one that fails.

    fails: whether a problem fails in the same way. enough: whether to stop, called before each try.
    """
    tried = {problem}
    while True:
        for candidate in reductions(problem):
            if candidate in tried:
                continue
            if enough():
                return problem
            tried.add(candidate)
            if fails(candidate):
                problem = candidate
                break
        else:
            return problem


def reductions(problem: Problem) -> Iterator[Problem]:
    """Smaller problems of the same op: all numbers at their least, all halved, then one by one,
    the boldest steps first. Finally, up to `MOST_JOINED` groups are joined into one.

    Some hold no fewer elements (an output grows as a stride shrinks), but each is simpler. The
    problem itself may be among them.
    """
    spec = spec_of(problem.op)
    for fewer in _fewer(spec.numbers(problem)):
        try:
            yield spec.rebuild(problem.op, fewer)
        except ShapeError:  # a window larger than its image, for example
            continue


def elements(problem: Problem) -> int:
    """The number of elements of a problem: inputs, weights and output."""
    weights = [spec.shape for spec in problem.op.weights()]
    return sum(math.prod(shape) for shape in (*problem.inputs, *weights, problem.output))


MOST_JOINED = 4
"""The most groups that are joined; the weights grow by that factor."""


def _fewer(numbers: Numbers) -> Iterator[Numbers]:
    least = {name: int(name not in FROM_ZERO) for name in numbers}
    yield least
    yield {name: max(least[name], n // 2) for name, n in numbers.items()}
    smaller = {name: steps(n, least[name]) for name, n in numbers.items()}
    for rank in range(max(map(len, smaller.values()))):
        for name, values in smaller.items():
            if rank < len(values):
                yield numbers | {name: values[rank]}
    for name, groups in numbers.items():
        if name.endswith("groups") and 1 < groups <= MOST_JOINED:
            prefix = name.removesuffix("groups")
            channels = {prefix + of for of in "co"} & numbers.keys()
            yield numbers | {one: groups * numbers[one] for one in channels} | {name: 1}


def steps(n: int, least: int) -> tuple[int, ...]:
    """Numbers to try instead of `n`, ascending: the least, n // 2, n − (n >> i) and n − 2^i.

    n − (n >> i) keeps a residue that halving loses: an odd 29 becomes 15, 8, 7 or 3. The powers of
    two keep n modulo any power of two: 49 becomes 41 where only n % 8 == 1 fails.
    """
    bits = range(n.bit_length())
    found = {least, n // 2, *(n - (n >> i) for i in bits), *(n - (1 << i) for i in bits)}
    return tuple(sorted(value for value in found if least <= value < n))
