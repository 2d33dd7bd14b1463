"""Settling a convolution again, after the search has found it wrong on a shape that no probe poses.

A library may choose an FFT for that shape only, and sums are exact where an FFT is not. So the
problem of the finding is posed as the probe of transforms poses its own. A function that transforms
it is settled with it, and examined on it under the contract that is found then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from r18.graph.ops import Conv2d, Problem
from r18_oracle.check.call import attempted
from r18_oracle.check.checks import VALUES
from r18_oracle.findings import Finding
from r18_oracle.functions.target import Target, backend_of
from r18_oracle.generate.shrink import elements
from r18_oracle.ops.table import spec_of
from r18_oracle.probe.settle import MOST_ELEMENTS, MOST_MACS, Announce, Found, first_finding, settle
from r18_oracle.probe.transforms import KNOWN, leaks, note_on

OF_VALUES = (*VALUES, "bias", "batch_invariance", "sample_position")
"""The checks that the rounding errors of a transform can fail."""


@dataclass(frozen=True)
class Again:
    """found: by the second settling. finding: of the examination that followed; None if the
    function was right, and where the contract is as before."""

    found: Found
    finding: Finding | None = None


def posed(findings: Sequence[Finding]) -> list[Problem]:
    """The problems of the calls that gave the findings' values: convolutions of stride 1.

    Empty if any of the findings is about something else.
    """
    problems = []
    for finding in findings:
        problem = finding.problem
        if problem is None or finding.check not in OF_VALUES:
            return []
        if not isinstance(problem.op, Conv2d) or problem.op.stride != (1, 1):
            return []
        if finding.check == "batch_invariance":  # the whole batch was right
            inputs = tuple((1, *shape[1:]) for shape in problem.inputs)
            problem = replace(problem, inputs=inputs)
        problems.append(problem)
    return problems


def settle_again(*, found: Found, findings: Sequence[Finding], announce: Announce) -> Again | None:
    """Settle a function again that was found wrong, in a worker process.

    None unless it transforms the problem of each finding. Where no contract of a transform fits it,
    what was found before stays, with a note.
    """
    target, problems = found.target, posed(findings)
    backend = backend_of(target.name)
    for problem in problems:
        announce(problem, "none", 0)
        leaked = attempted(lambda one=problem: leaks(backend, one, target.dtype))  # type: ignore[misc]
        if leaked is not True:  # it may have raised
            return None
    again = settle(target=replace(target, contract=""), announce=announce, also=problems)
    if again.arithmetic is None or again.arithmetic.algorithm not in KNOWN:
        return Again(replace(found, notes=(*found.notes, note_on(problems, None))))
    return Again(again, _finding(again.target, findings, announce))


def _finding(target: Target, findings: Sequence[Finding], announce: Announce) -> Finding | None:
    """The first finding of all checks on the problems of these findings and on larger ones of the
    same windows. A search draws such problems only by chance, and a finding's was shrunk until
    hardly more than rounding errors was left to find."""
    for finding in findings:
        assert finding.problem is not None  # it is about values
        problems = _and_larger(finding.problem)
        rounding = finding.details.get("rounding", "normal")
        found = first_finding(target, problems, announce, seed=finding.seed, rounding=rounding)
        if found is not None:
            return found
    return None


def _and_larger(problem: Problem) -> Iterator[Problem]:
    """A convolution, and larger ones up to the size of a quick search's."""
    spec = spec_of(problem.op)
    yield problem
    while True:
        numbers = spec.numbers(problem)
        numbers |= {name: 2 * numbers[name] + 1 for name in "nchwo"}
        problem = spec.rebuild(problem.op, numbers)
        if elements(problem) > MOST_ELEMENTS or problem.macs > MOST_MACS:
            return
        yield problem


__all__ = ["OF_VALUES", "Again", "posed", "settle_again"]
