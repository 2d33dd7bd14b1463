"""The inner loops of kernels that run on the host, and the share of the CPU's peak they reach.

A kernel names the instruction that it multiplies with. Here its assembly is read: how many of these
are in each innermost loop, and how many registers are spilled there. Timed on a problem of
ResNet-18, its products a second over the instruction's measured rate are the share of the peak.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from r18.backend import Backend, Ceiling, HostCode, Kernel
from r18.backend.launch import refusal_of
from r18.bench.roofline import algorithm_of, own_operations
from r18.bench.tuning import Range, tuned_schedules
from r18.errors import UsageError
from r18.graph.ops import Problem
from r18.graph.passes import FUSION_LEVELS
from r18.graph.resnet import resnet18

BATCH = 8
CALLS, RUNS = 3, 20
"""Calls of a timed run, and runs. The best counts, of kernels and of instructions: a disturbed run
of one would make shares too small, of the other too large."""

LABEL = re.compile(r"^(\.?L\w+):")
INSTRUCTION = re.compile(r"^\s+([a-z][\w.]*)(?:\s+([^#\n]*?))?\s*(?:(?:#|//|##|;) ?(.*))?$")
SPILL, RELOAD = re.compile(r"-byte (?:Folded )?Spill"), re.compile(r"-byte (?:Folded )?Reload")
"""LLVM's comments: a register is written to the stack, or read back."""


@dataclass(frozen=True)
class Loop:
    """An innermost loop of those that multiply, without loops in it that do not.

    products: instructions that multiply. spills, reloads: registers that are written to the stack
    and read from it. lines: the assembly, without comments on anything else.
    """

    products: int
    instructions: int
    spills: int
    reloads: int
    lines: tuple[str, ...]


def inner_loops(code: HostCode) -> tuple[Loop, ...]:
    """The innermost loops that multiply: those with the most products first, then the shortest.

    A loop is the code between a label and a jump back to it. It is an innermost one if it contains
    no other that multiplies; what others it contains, an epilogue between products, is left out.
    """
    lines = code.assembly.splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := LABEL.match(line))}
    ends: dict[int, int] = {}
    for at, line in enumerate(lines):
        found = INSTRUCTION.match(line)
        target = (found[2] or "").rpartition(",")[2].strip() if found else ""
        if labels.get(target, at) < at:
            ends[labels[target]] = at  # the last jump back ends it
    spans = sorted(ends.items())
    inside = {
        (first, last): [
            (a, b) for a, b in spans if first <= a and b <= last and (a, b) != (first, last)
        ]
        for first, last in spans
    }
    multiplying: dict[tuple[int, int], Loop] = {}
    for first, last in spans:
        others = {at for a, b in inside[first, last] for at in range(a, b + 1)}
        own = [line for at, line in enumerate(lines[first : last + 1], first) if at not in others]
        loop = _loop(own, code.instruction)
        multiplying |= {(first, last): loop} if loop.products else {}
    inner = [loop for span, loop in multiplying.items() if not multiplying.keys() & inside[span]]
    return tuple(sorted(inner, key=lambda loop: (-loop.products, loop.instructions)))


def _loop(lines: Sequence[str], instruction: str) -> Loop:
    kept, mnemonics, comments = [], [], []
    for line in lines:
        found = INSTRUCTION.match(line)
        if found is None or found[1].startswith("."):
            kept += [found_label[0]] if (found_label := LABEL.match(line)) else []
            continue
        mnemonics.append(found[1])
        comment = found[3] or ""
        comments.append(comment)
        moved = SPILL.search(comment) or RELOAD.search(comment)
        said = f"{found[1]:<14} {found[2] or ''}".rstrip()
        kept.append(f"    {said}" + (f"  # {comment.strip()}" if moved else ""))
    return Loop(
        mnemonics.count(instruction),
        len(mnemonics),
        sum(1 for comment in comments if SPILL.search(comment)),
        sum(1 for comment in comments if RELOAD.search(comment)),
        tuple(kept),
    )


@dataclass(frozen=True)
class Share:
    """Operations a second that a kernel reached on its problem, and the rate of its instruction."""

    reached: float
    peak: float

    @property
    def ratio(self) -> float:
        return self.reached / self.peak


@dataclass(frozen=True)
class Seen:
    """A kernel's loops for a problem, and its share where it was measured."""

    kernel: str
    problem: Problem
    instruction: str
    loops: tuple[Loop, ...]
    share: Share | None


@dataclass(frozen=True)
class Result:
    """The inner loops of several kernels; ceilings: those that shares are of."""

    kernels: tuple[Seen, ...]
    ceilings: tuple[Ceiling, ...] = ()

    def text(self) -> str:
        """The fullest loop of each kernel in assembly, then a table of all kernels."""
        parts = [
            "\n".join((f"{seen.kernel}, {seen.problem}", *seen.loops[0].lines))
            for seen in self.kernels
            if seen.loops
        ]
        align = ("left", "left", *("right",) * (len(_heads(self)) - 2))
        rows = [_row(seen, bool(self.ceilings)) for seen in self.kernels]
        parts.append(tabulate(rows, _heads(self), disable_numparse=True, colalign=align))
        if self.ceilings:
            parts.append("\n".join(map(_peak_words, self.ceilings)))
        return "\n\n".join(parts)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "kernel": seen.kernel,
                "problem": str(seen.problem),
                "instruction": seen.instruction,
                "loops": [asdict(loop) for loop in seen.loops],
                "operations_per_second": seen.share and seen.share.reached,
                "peak": seen.share and seen.share.peak,
                "share": seen.share and seen.share.ratio,
            }
            for seen in self.kernels
        ]


def _peak_words(ceiling: Ceiling) -> str:
    return f"peak {best(ceiling) / 1e9:,.1f} GFLOP/s: {ceiling.how}"


def _heads(result: Result) -> tuple[str, ...]:
    heads = ("kernel", "multiplies by", "loops", "products", "instructions", "spilled", "reloaded")
    return (*heads, "GFLOP/s", "of peak") if result.ceilings else heads


def _row(seen: Seen, measured: bool) -> tuple[str, ...]:
    """Products and instructions of the fullest loop; spills of all."""
    first = seen.loops[0] if seen.loops else Loop(0, 0, 0, 0, ())
    counts = (len(seen.loops), first.products, first.instructions)
    moved = (sum(loop.spills for loop in seen.loops), sum(loop.reloads for loop in seen.loops))
    row = (seen.kernel, seen.instruction, *map(str, (*counts, *moved)))
    if not measured:
        return row
    share = seen.share
    return (*row, *((f"{share.reached / 1e9:,.1f}", f"{share.ratio:.0%}") if share else ("", "")))


def look(
    backend: Backend,
    kernels: Sequence[Kernel],
    *,
    measure: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Result:
    """The inner loops of the kernels that have any, each on a problem of ResNet-18 of batch 8.

    The problem is the one of the kernel's op with the most operations in all steps together.
    measure: also time the instructions and the kernels, on an idle machine. Raises `UsageError`
    where no kernel has code of the host.
    """
    problems = dict(_problems(backend, kernels))
    codes: dict[str, HostCode] = {}
    for kernel in kernels:
        if kernel.id in problems:
            progress(f"compiling {kernel.id}")
            code = backend.host_code(kernel, problems[kernel.id])
            codes |= {} if code is None else {kernel.id: code}
    if not codes:
        raise UsageError(
            f"none of these {len(kernels)} kernels of '{backend.name}' is compiled for the CPU and "
            "multiplies in ResNet-18\n  r18 kernels --backend numba-cpu --assembly has some"
        )
    ceilings = backend.ceilings(progress) if measure else ()
    found = []
    for kernel in kernels:
        if kernel.id in codes:
            code, problem = codes[kernel.id], problems[kernel.id]
            progress(f"timing {kernel.id}")
            share = _share(backend, kernel, problem, peak(code, kernel, ceilings))
            found.append(Seen(kernel.id, problem, code.instruction, inner_loops(code), share))
    return Result(tuple(found), ceilings)


def peak(code: HostCode, kernel: Kernel, ceilings: Sequence[Ceiling]) -> float | None:
    """The best rate of the kernel's instruction, else the highest of its precision."""
    named = [one for one in ceilings if one.what == code.instruction]
    named = named or [one for one in ceilings if one.precision == kernel.precision.name]
    return max(map(best, named), default=None)


def best(ceiling: Ceiling) -> float:
    """Operations a second in the best run."""
    return max(ceiling.burst.best, ceiling.sustained.best)


def _share(backend: Backend, kernel: Kernel, problem: Problem, rate: float | None) -> Share | None:
    if rate is None:
        return None
    place = Range(backend, problem, kernel.precision)
    launches = place.launches(kernel)
    seconds = min(place.measure(launches, CALLS, 1) for _ in range(RUNS)) / 1e6
    return Share(own_operations(problem, algorithm_of(kernel.id)) / seconds, rate)


def _problems(backend: Backend, kernels: Sequence[Kernel]) -> Iterator[tuple[str, Problem]]:
    """The problem of each kernel that multiplies in the network."""
    works: dict[str, Mapping[Problem, int]] = {}
    for kernel in kernels:
        name = kernel.precision.name
        if name not in works:
            works[name] = _work(backend, name)
        mine = {
            problem: work
            for problem, work in works[name].items()
            if refusal_of(kernel, problem) is None and work
        }
        if mine:
            yield kernel.id, max(mine, key=lambda problem: mine[problem])


def _work(backend: Backend, precision: str) -> Mapping[Problem, int]:
    """Multiply-accumulates of each problem of the network, in all of its steps together."""
    found: dict[Problem, int] = {}
    for schedule in tuned_schedules(backend, resnet18(), FUSION_LEVELS[-1:], [precision])[:1]:
        for problem in schedule.problems(BATCH).values():
            found[problem] = found.get(problem, 0) + problem.macs
    return found


__all__ = ["Loop", "Result", "Seen", "Share", "best", "inner_loops", "look", "peak"]
