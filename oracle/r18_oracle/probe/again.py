"""Settling a convolution again, after the search has found it wrong on a shape that no probe poses.

A library may choose an FFT for that shape only, and sums are exact where an FFT is not. So the
problem of the finding is posed as the probe of transforms poses its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from r18.graph.ops import Problem
from r18_oracle.check.call import attempted
from r18_oracle.check.checks import VALUES
from r18_oracle.findings import Finding
from r18_oracle.functions.target import backend_of
from r18_oracle.probe.settle import Announce, Found, settle
from r18_oracle.probe.transforms import KNOWN, leaks, note_on

OF_VALUES = (*VALUES, "bias", "batch_invariance", "sample_position")
"""The checks that the rounding errors of a transform can fail."""


def called(finding: Finding) -> Problem | None:
    """The problem of the call that gave a finding's values; None if it is not about values."""
    problem = finding.problem
    if problem is None or finding.check not in OF_VALUES:
        return None
    if finding.check == "batch_invariance":  # the whole batch was right
        return replace(problem, inputs=tuple((1, *shape[1:]) for shape in problem.inputs))
    return problem


def settle_again(*, found: Found, problems: Sequence[Problem], announce: Announce) -> Found | None:
    """Settle a function again that was found wrong on these problems, in a worker process.

    None unless it transforms each of them. Where no contract of a transform fits it, what was found
    before stays, with a note.
    """
    target = found.target
    backend = backend_of(target.name)
    for problem in problems:
        announce(problem, "none", 0)
        leaked = attempted(lambda one=problem: leaks(backend, one, target.dtype, wider=True))  # type: ignore[misc]
        if leaked is not True:  # it may have raised
            return None
    again = settle(target=replace(target, contract=""), announce=announce, also=problems)
    if again.arithmetic is None or again.arithmetic.algorithm not in KNOWN:
        return replace(found, notes=(*found.notes, note_on(problems, None)))
    return again


__all__ = ["OF_VALUES", "called", "settle_again"]
