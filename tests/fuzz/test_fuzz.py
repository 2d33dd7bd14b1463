"""Damaged files for every parser: accepted or refused with a message, in limited memory and time.

A short run; `PYTHONPATH=tests python -m fuzz --minutes 60` is a long one.
"""

from __future__ import annotations

import io
import os
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz import campaign as campaigns
from fuzz import runs
from fuzz import targets as target_list
from fuzz.__main__ import main
from fuzz.campaign import Tally, campaign
from fuzz.damage import damaged, of_members
from fuzz.runs import files, read_one
from fuzz.targets import TARGETS, Target
from r18.errors import R18Error
from support import ROOT, output_of

FILES = 90
"""The number of damaged files for a parser of weight 1."""
CORPUS = Path(__file__).parent / "corpus"


def named(target: Target) -> str:
    return target.name


@pytest.mark.parametrize("target", TARGETS, ids=named)
def test_valid_files_are_accepted(target: Target, tmp_path: Path) -> None:
    (first, *_) = target.valid
    target.put(tmp_path, first)
    target.read(tmp_path)


@pytest.mark.parametrize("target", TARGETS, ids=named)
def test_damaged_files_are_accepted_or_refused_in_words(target: Target, tmp_path: Path) -> None:
    for data in files(target, "ci", int(FILES * target.weight)):
        assert read_one(target, data, tmp_path) is None


@pytest.mark.parametrize("target", TARGETS, ids=named)
def test_files_that_once_failed(target: Target, tmp_path: Path) -> None:
    for path in sorted((CORPUS / target.name).glob("*")):
        assert read_one(target, path.read_bytes(), tmp_path) is None, path


NAMED = {
    "integers": "`.bin` tensors",
    "tensor": "`.bin` tensors",
    "sidecar": "manifests",
    "csv labels": "labels",
    "text labels": "labels",
    "table": "evaluation tables",
    "parquet": "Parquet",
    "salvage": "journals",
    "tuned": "tuning tables",
    "image": "photographs",
    "QDQ model": "`.onnx` with QDQ",
    "quantised manifest": "manifests",
}
"""SECURITY.md's name for a parser's files, if it is not the parser's own."""


def test_security_names_the_files_of_every_parser() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    untrusted = text.partition("## Untrusted input")[2].partition("\n## ")[0]
    for target in TARGETS:
        assert NAMED.get(target.name, target.name) in untrusted
    for heading in ("Trusted input", "What a digest says", "What a kill leaves behind"):
        assert f"\n## {heading}\n" in text
    assert "**`r18 verify` is no sandbox.**" in text


def test_the_corpus_belongs_to_parsers() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= {target.name for target in TARGETS}


def test_damage_is_seeded_and_changes_files() -> None:
    data = bytes(range(256)) * 4
    drawn = [[damaged(random.Random(seed), data) for seed in range(50)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 40


def test_an_archive_without_members_is_damaged_too() -> None:
    stream = io.BytesIO()
    zipfile.ZipFile(stream, "w").close()
    assert of_members(random.Random(0), stream.getvalue()) != stream.getvalue()


def test_what_a_bad_parser_does_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad parsers are found: Python's errors, control characters, long messages, time, memory."""

    def found(read: object) -> str | None:
        return read_one(Target("x", "f", lambda _: None, read), b"", tmp_path)  # type: ignore[arg-type]

    def refuse(text: str) -> None:
        raise R18Error(text)

    class Raw(R18Error):
        def __str__(self) -> str:
            return "\x1b[2J"

    def raw(_: Path) -> None:
        raise Raw

    def loop(_: Path) -> None:
        while True:
            pass

    assert found(lambda _: None) is None
    assert found(lambda _: refuse("in words")) is None
    assert "KeyError in test_fuzz.py" in str(found(lambda _: {}["x"]))
    assert "control characters" in str(found(raw))
    assert "a message of 5000 characters" in str(found(lambda _: refuse("x" * 5000)))
    monkeypatch.setattr(runs, "SECONDS", 0.05)
    assert "it took more than 0.05 s" in str(found(loop))


def test_much_memory_is_found(tmp_path: Path) -> None:
    """Much memory is found, in a child of a small process, whose peak it inherits."""
    code = f"""
import os
from pathlib import Path
from fuzz import runs
from fuzz.targets import Target

if os.fork():
    os.wait()
else:
    read = lambda _: len(b"x" * ((runs.GROWTH + (1 << 10)) << 10)) and None
    print(runs.read_one(Target("x", "f", lambda _: None, read), b"", Path({str(tmp_path)!r})))
"""
    assert re.fullmatch(r"it took \d+ MB", output_of(code, path=[ROOT / "tests"]))


def test_a_crash_is_a_failure(tmp_path: Path) -> None:
    dies = Target(
        "x", "f", lambda folder: (folder / "f").write_bytes(b"x"), lambda _: os.kill(os.getpid(), 9)
    )
    (failure,) = runs.chunk(dies, "0", 3, tmp_path)
    assert "the process ended: " in failure.why


def plain(name: str, read: Callable[[Path], object], **more: Any) -> Target:
    """A parser of one short file."""
    return Target(name, "f", lambda folder: (folder / "f").write_bytes(b"valid"), read, **more)


def refuses_damage(folder: Path) -> None:
    if (folder / "f").read_bytes() != b"valid":
        raise R18Error("damaged")


def run(targets: list[Target], out: Path, processes: int, files: int) -> Tally:
    return campaign(targets, 3, out, processes=processes, seconds=60, most=files)


def test_several_processes_read_the_files_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes read each turn once, so that the same files fail."""
    monkeypatch.setattr(campaigns, "CHUNK", 20)

    def fails(folder: Path) -> None:
        data = (folder / "f").read_bytes()
        if data[:2] not in (b"va", b"", b"\0"):
            raise KeyError(len(data))

    kept = []
    for processes in (1, 3):
        out = tmp_path / str(processes)
        tally = run([plain("a", fails), plain("b", refuses_damage)], out, processes, 200)
        assert tally.files == {"a": 100, "b": 100}
        assert not tally.lost
        assert not tally.sound
        kept.append(tally.failed)
    assert kept[0] == kept[1]
    assert 10 < kept[0]["a"] < 100
    assert not kept[0]["b"]
    assert list((tmp_path / "3" / "a").iterdir())


def test_a_process_that_ends_early_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaigns, "chunk", lambda *_: os._exit(1))
    tally = run([plain("a", refuses_damage)], tmp_path, 2, 10**6)
    assert tally.lost == 2
    assert not tally.sound


def test_a_parser_that_refuses_a_valid_file_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser that refuses a valid file fails, or a missing library would hide every failure."""
    monkeypatch.setattr(campaigns, "CHUNK", 20)

    def refuse(_: Path) -> None:
        raise R18Error("pip install it")

    tally = run([plain("a", refuse)], tmp_path, 1, 20)
    assert tally.failed == {"a": 1}


def test_a_parser_whose_library_is_missing_is_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaigns, "CHUNK", 5)
    lacking = plain("lacking", refuses_damage, needs=("no_such_library",))
    monkeypatch.setattr(target_list, "TARGETS", (plain("a", refuses_damage), lacking))
    monkeypatch.setattr(
        "sys.argv", ["fuzz", "--files", "12", "--out", str(tmp_path), "--processes", "2"]
    )
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert main() == 0
    said = capsys.readouterr().out
    assert "a                         15 files      0 failed" in said
    assert "lacking            skipped: no_such_library is not installed" in said
    assert "15 files, 0 failed, in " in said
