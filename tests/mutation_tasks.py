"""Tasks for workers, about the processes that mutants run in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from r18_oracle.findings import Finding
from r18_oracle.mutation import trial as trials
from r18_oracle.mutation.mutants import Mutant
from r18_oracle.mutation.process import Process, Say
from r18_oracle.mutation.trial import Passed, Question


@dataclass(frozen=True)
class Told:
    """A trial's result, and the id of the process that is kept for the next trial, or None."""

    found: Finding | Passed | None
    kept: int | None


def one_after_another(
    announce: object, question: Question, mutants: Sequence[Mutant | None], kernels: list[str]
) -> list[Told]:
    results: list[Told] = []
    for mutant in mutants:
        found = trials.trial(None, question, mutant, kernels, 10)
        (kept,) = trials._kept or [None]
        results.append(Told(found, kept and kept.child))
    return results


def asked_thrice(announce: object) -> list[list[object]]:
    """A process's answers to three requests; the last request ends it."""

    def work(request: str, say: Say) -> object:
        say(f"to {request}")
        if request == "die":
            os._exit(0)
        return os.getpid() != parent

    parent = os.getpid()
    process = Process(work)
    try:
        return [process.ask(request, 10) for request in ("a", "b", "die")]
    finally:
        process.end()
