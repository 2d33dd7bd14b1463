"""Mutants of code that Numba compiles for the CPU: which count, and files that they leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from r18_oracle.findings import Finding
from r18_oracle.mutation.mutants import Mutant, Target, mutants_of
from r18_oracle.mutation.trial import INVALID, Passed, Question, trial
from r18_oracle.search.profiles import profile
from r18_oracle.search.worker import Job, Pool

FILE = "kernels/others.py"
KERNEL = "numba-cpu/relu/maximum/fp32"


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return mutants_of(FILE, Target.of("numba-cpu").sources()[FILE])


def job(question: Question, mutant: Mutant | None, *precisions: str) -> Job:
    arguments = {
        "question": question,
        "mutant": mutant,
        "kernels": [KERNEL],
        "silence_seconds": 60,
        "precisions": precisions,
    }
    return Job(trial, arguments, "numba-cpu", "", silence_seconds=120.0)


def in_rectify(mutants: list[Mutant], after: str) -> Mutant:
    return next(m for m in mutants if m.scope == "rectify" and m.after == after)


def test_docstrings_comments_and_annotations_are_left_alone(mutants: list[Mutant]) -> None:
    source = Target.of("numba-cpu").sources()[FILE]
    for mutant in mutants:
        for mark in ("# type: ignore", '"""', "@kernel"):
            assert mutant.source.count(mark) == source.count(mark)
        if mutant.operator != "statement":  # a loop takes with it what stands in it
            assert mutant.source.count("# fmt: skip") == source.count("# fmt: skip")


def test_mutants_are_compiled_anew_and_leave_nothing_behind(
    mutants: list[Mutant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "cache"
    monkeypatch.setenv("R18_CACHE", str(mine))
    root = tmp_path / "run"
    root.mkdir()
    question = Question(Target.of("numba-cpu"), root, profile("quick"), seed=0, network=None)
    wrong = in_rectify(mutants, "last = min(x.size, (span) * SPAN)")
    no_program = replace(
        wrong, source=mutants[0].source.replace("prange(spans)", "prange(spans.none)", 1)
    )

    def found(*asked: Mutant | None) -> list[Finding | Passed | None]:
        return [outcome.result for outcome in pool.run([job(question, m) for m in asked])]

    with Pool(1, 2) as pool:
        (passed,) = found(None)
        assert isinstance(passed, Passed)
        compiled = sorted(path for path in question.cache.rglob("*") if path.is_file())
        assert compiled
        killed, invalid = found(wrong, no_program)
        # One that changes nothing but the place of its lines is as right as the original.
        moved = replace(wrong, source=Target.of("numba-cpu").sources()[FILE] + "\n\n")
        assert found(moved) == [None]
    assert isinstance(killed, Finding)
    assert killed.check == "full_write"
    assert isinstance(invalid, Finding)
    assert invalid.check == INVALID
    assert "TypingError" in invalid.message
    assert sorted(path for path in question.cache.rglob("*") if path.is_file()) == compiled
    assert not mine.exists()
    assert [path.name for path in root.iterdir()] == ["cache"]


def test_a_captured_program_that_ends_early_is_found_in_a_network(tmp_path: Path) -> None:
    """A captured program that ends early shows in a network, as no kernel alone is captured."""
    capturing = mutants_of("compiled.py", Target.of("numba-cpu").sources()["compiled.py"])
    (ends,) = (m for m in capturing if m.scope == "CallStream.capture.launch" and m.kind == "state")
    question = Question(Target.of("numba-cpu"), tmp_path, profile("brief"), seed=0, network=None)
    with Pool(1, 2) as pool:
        # What the unchanged network compiles, the mutants load from its cache.
        unchanged, alone, in_network = (
            outcome.result
            for outcome in pool.run(
                [job(question, None, "fp32"), job(question, ends), job(question, ends, "fp32")]
            )
        )
    assert alone is None
    assert isinstance(in_network, Finding)
    assert in_network.kernel == "numba-cpu/program/all/fp32"
    assert isinstance(unchanged, Passed)
