"""Data flow over a kernel's PTX: the facts that may hold at an instruction, and values' origins.

A forward "may" analysis (Aho, Lam, Sethi, Ullman, Compilers, 2nd edition, section 9.2): at a join
the facts of all paths are united, so that a fact is missing only if it holds on no path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from r18_oracle.ptx.parse import Function, Instruction

F = TypeVar("F", bound=Hashable)
Step = Callable[[Instruction, frozenset[F]], frozenset[F]]


def solve(
    function: Function,
    step: Step[F],
    start: frozenset[F] = frozenset(),
    *,
    within: tuple[tuple[Instruction, ...], ...] | None = None,
) -> Iterator[tuple[Instruction, frozenset[F]]]:
    """Each reachable instruction with the facts that may hold before it, in the PTX's order.

    step:  returns the facts after an instruction, from those before it. It must be monotonic.
    start: the facts at the function's entry.
    within: the instructions of each block that take part; by default `Function.ordering`.
    """
    blocks, ordering = function.blocks, within or function.ordering
    entering: list[frozenset[F] | None] = [None] * len(blocks)
    entering[0] = start
    todo = [0]
    while todo:
        index = todo.pop()
        facts = entering[index]
        assert facts is not None
        for instruction in ordering[index]:
            facts = step(instruction, facts)
        for successor in blocks[index].successors:
            before = entering[successor]
            joined = facts if before is None else before | facts
            if joined != before:
                entering[successor] = joined
                todo.append(successor)
    for index, instructions in enumerate(ordering):
        facts = entering[index]
        if facts is None:
            continue
        for instruction in instructions:
            yield instruction, facts
            facts = step(instruction, facts)


def after(function: Function, wanted: Callable[[Instruction], bool]) -> set[Instruction]:
    """The instructions of `Function.ordering` after which a wanted one may follow."""
    having = {i for i, block in enumerate(function.ordering) if any(map(wanted, block))}
    found = set()
    for index, instructions in enumerate(function.ordering):
        coming = bool(having & function.reachable[index])
        for instruction in reversed(instructions):
            if coming:
                found.add(instruction)
            coming = coming or wanted(instruction)
    return found


def parameters_of(function: Function) -> dict[str, frozenset[int]]:
    """For each register, the positions of the parameters that its value may be computed from.

    Flow-insensitive: all definitions of a register count. Values that come from memory other than
    the parameters have no position.
    """
    place = {name: index for index, name in enumerate(function.parameters)}
    found: dict[str, set[int]] = {name: {index} for name, index in place.items()}
    readers: dict[str, list[tuple[str, ...]]] = {}
    for instruction in filter(_defines, function.instructions):
        into = results(instruction)
        for name in set(instruction.names[len(into) :]):
            readers.setdefault(name, []).append(into)
    todo = list(place)
    while todo:
        name = todo.pop()
        for into in readers.get(name, ()):
            for result in into:
                before = found.setdefault(result, set())
                if not found[name] <= before:
                    before |= found[name]
                    todo.append(result)
    return {name: frozenset(positions) for name, positions in found.items()}


def _defines(instruction: Instruction) -> bool:
    """Whether an instruction computes a register from its operands."""
    if instruction.starts("ld"):
        return instruction.starts("ld.param")
    return not instruction.starts(
        *("st", "bra", "ret", "exit", "bar", "barrier", "membar", "fence", "red", "setp", "wgmma"),
        *(
            "mbarrier",
            "cp",
            "prefetch",
            "griddepcontrol",
            "atom",
            "shfl",
            "setmaxnreg",
            "nanosleep",
        ),
    )


def results(instruction: Instruction) -> tuple[str, ...]:
    """The registers that an instruction with a result writes: one, or a vector in braces."""
    vector = re.match(r"\{([^}]*)\}", instruction.operands)
    if vector is None:
        return (instruction.written,)
    return tuple(name.strip() for name in vector[1].split(","))
