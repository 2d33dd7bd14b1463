"""Shrinking what took a worker process down: the same kernel on smaller problems, in workers.

Each problem that fails costs a process, so few are tried.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from r18.graph.ops import Problem
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed, Finding
from r18_oracle.generate.shrink import shrunk
from r18_oracle.search.campaign import Announce, Profile
from r18_oracle.search.tasks import kernel_of, loaded_backend
from r18_oracle.search.worker import Job, Pool

TRIALS = 16
"""The most problems that are tried for one finding."""
SECONDS = 20.0
"""After so long, or a profile's `shrink_seconds` if that is longer, no further one is tried."""
SILENCE_SECONDS = 10.0
"""A smaller problem hangs when nothing is heard for so long: it takes milliseconds else."""


def smallest(finding: Finding, how: Profile, pool: Pool) -> Finding:
    """A kernel's crash or hang on the smallest problem that shows it; any other finding as it is.

    So is one whose worker died before it said on what.
    """
    if finding.check not in ("crash", "hang") or finding.problem is None:
        return finding
    best = finding
    trials = 0
    deadline = time.monotonic() + max(SECONDS, how.shrink_seconds)

    def fails(problem: Problem) -> bool:
        nonlocal best, trials
        trials += 1
        again = _tried(finding, problem, pool)
        # On no problem: it had not begun, so the problem is not what it died of.
        if again is None or (again.check, again.problem) != (finding.check, problem):
            return False
        best = again
        return True

    shrunk(finding.problem, fails, lambda: trials == TRIALS or time.monotonic() > deadline)
    return best


def _tried(finding: Finding, problem: Problem, pool: Pool) -> Finding | None:
    """What comes of the finding's kernel and inputs on another problem, if its worker is lost."""
    seconds = min(SILENCE_SECONDS, finding.details["silence_seconds"])
    job = Job(
        examination,
        {
            "backend": finding.backend,
            "kernel": finding.kernel,
            "problem": problem,
            "seed": finding.seed,
            "rounding": finding.details["rounding"],
            "light": finding.details["light"],
        },
        finding.backend,
        finding.kernel,
        seconds,
    )
    (outcome,) = pool.run([job])
    if outcome.finding is None:
        return None
    return replace(outcome.finding, details=finding.details | {"silence_seconds": seconds})


def examination(
    *,
    backend: str,
    kernel: str,
    problem: Problem,
    seed: int,
    rounding: str,
    light: bool,
    announce: Announce,
) -> None:
    """Examine a kernel and its choices on one problem, to see whether the process survives it."""
    loaded = loaded_backend(backend)
    chosen = kernel_of(loaded, kernel)
    for one in (chosen, *loaded.variants(chosen)):
        with suppress(Failed):  # another fault than the one looked for
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
