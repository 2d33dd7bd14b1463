"""Survivors in device code under compute-sanitizer: faults that may not change any value.

A kernel without a barrier may give right values a million times, and a read of uninitialised memory
may give the same value each time. The tools see the access itself. A mutant that passes every check
therefore runs under the tools too, in processes that import the mutated copy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from r18.errors import R18Error, UsageError
from r18_oracle.findings import Finding
from r18_oracle.mutation.mutants import Mutant, Target
from r18_oracle.mutation.trial import copied
from r18_oracle.sanitize.run import TOOLS, KernelResult, Part, Request, Runner, find, parts


@dataclass(frozen=True)
class Heard:
    """The tools' report on a mutant: the first error, or `clean` if all tools finished."""

    finding: Finding | None = None
    clean: bool = False


def sanitizer() -> Path | None:
    """The path of compute-sanitizer, or None if it is not installed."""
    try:
        return find()
    except UsageError:
        return None


def heard(
    program: Path, target: Target, mutant: Mutant, request: Request, jobs: int, deadline: float
) -> Heard:
    """The first error that a tool finds in the mutant's kernels but not in the unchanged ones.

    request: for the kernels that the mutant is shown to. jobs, deadline: see `Runner`; if the time
    runs out, there is no finding and `clean` is False. Raises `R18Error` if an unchanged kernel
    also has errors.
    """
    results: list[KernelResult] = []
    with tempfile.TemporaryDirectory(prefix="r18-mutate-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        root = copied(target, folder / "changed", {mutant.file: mutant.source})
        variables = {**importing(root), "R18_CACHE": str(folder / "cache")}
        runner = Runner(program, request, jobs, deadline, variables)
        todo = parts(dict.fromkeys(TOOLS, request.kernels), jobs)
        with closing(runner.run(todo)) as running:
            for some in running:
                results += some
                if _guilty(some):
                    break
    found = _guilty(results)
    if found is None:
        asked = len(TOOLS) * len(request.kernels)
        return Heard(clean=sum(result.verdict == "clean" for result in results) == asked)
    unchanged = Runner(program, request, 1, deadline).part(Part(found.tool, (found.kernel,)))
    if _guilty(unchanged):
        raise R18Error(
            f"{found.tool} finds errors in the unchanged {found.kernel}, so it cannot judge "
            "mutants: run r18 sanitize first"
        )
    if not unchanged:  # there was no time
        return Heard()
    said = "; ".join(map(str, found.complaints[:3])) or f"{found.errors} errors"
    where = request.backend, found.kernel, None, "none", request.seed
    return Heard(Finding(found.tool, *where, said))


def importing(root: Path) -> Mapping[str, str]:
    """The environment variables that make a process import this copy, not the installed package."""
    paths = (str(root.parent), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _guilty(results: Sequence[KernelResult]) -> KernelResult | None:
    """The first result with errors in the tool's own count."""
    return next((result for result in results if result.errors), None)


__all__ = ["Heard", "heard", "importing", "sanitizer"]
