"""Shrinking crashes and hangs: the same kernel on smaller problems, in worker processes.

Each problem that fails costs a process, so few are tried.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from r18.graph.ops import Problem
from r18_oracle.check.checks import examine
from r18_oracle.findings import SILENCE, STATE, Failed, Finding
from r18_oracle.generate.shrink import shrunk
from r18_oracle.loading import kernel_of, loaded_backend, with_choices
from r18_oracle.search.campaign import Announce
from r18_oracle.search.profiles import Profile
from r18_oracle.search.worker import Job, Pool

TRIALS = 16
"""The most problems tried for one finding."""
SECONDS = 20.0
"""Time limit of shrinking, or the profile's `shrink_seconds` if that is longer."""
SILENCE_SECONDS = 10.0
"""A smaller problem takes milliseconds; it hangs if nothing is heard for this long."""


def smallest(finding: Finding, how: Profile, pool: Pool) -> Finding:
    """A crash or hang on the smallest problem that shows it.

    Returns other findings unchanged, those that take a scenario of the check `state`, and those
    whose worker died before it announced a problem.
    """
    if finding.check not in ("crash", "hang") or finding.problem is None:
        return finding
    start = finding.problem
    if STATE in finding.details:
        plain = {key: value for key, value in finding.details.items() if key != STATE}
        by_itself = _crash_on(start, replace(finding, details=plain), pool)
        if by_itself is None or by_itself.check != finding.check:
            return finding  # it takes a scenario, and its problem is small
        finding = by_itself
    best = finding
    trials = 0
    deadline = time.monotonic() + max(SECONDS, how.shrink_seconds)

    def fails(problem: Problem) -> bool:
        nonlocal best, trials
        trials += 1
        again = _crash_on(problem, finding, pool)
        # A worker that died before its first announcement did not die of this problem.
        if again is None or (again.check, again.problem) != (finding.check, problem):
            return False
        best = again
        return True

    shrunk(start, fails, lambda: trials == TRIALS or time.monotonic() > deadline)
    return best


def _crash_on(problem: Problem, finding: Finding, pool: Pool) -> Finding | None:
    """The crash or hang of the finding's kernel on another problem with its inputs, or None."""
    seconds = min(SILENCE_SECONDS, finding.details[SILENCE])
    arguments = {
        "backend": finding.backend,
        "kernel": finding.kernel,
        "problem": problem,
        "seed": finding.seed,
        "rounding": finding.details["rounding"],
        "light": finding.details["light"],
    }
    (outcome,) = pool.run([Job(survive, arguments, finding.backend, finding.kernel, seconds)])
    if outcome.finding is None:
        return None
    return outcome.finding.with_details(finding.details | {SILENCE: seconds})


def survive(
    *,
    backend: str,
    kernel: str,
    problem: Problem,
    seed: int,
    rounding: str,
    light: bool,
    announce: Announce,
) -> None:
    """Examine a kernel and its choices on one problem; returns if the process survives it."""
    loaded = loaded_backend(backend)
    chosen = kernel_of(loaded, kernel)
    for one in with_choices(loaded, [chosen]):
        with suppress(Failed):  # another fault than the crash
            examine(
                loaded,
                one,
                problem,
                seed,
                rounding=rounding,
                light=light,
                backend_name=backend,
                announce=announce,
            )
