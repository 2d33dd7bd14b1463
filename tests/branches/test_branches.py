"""Branches that no problem takes are reported by file and line, and silenced by a reason there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import branches_toy
from r18.errors import BackendUnavailable, UnknownName, UsageError
from r18_oracle.branches.measure import Measured, measure, sources
from r18_oracle.branches.reasons import Reasons
from r18_oracle.branches.report import Report, branches, judged
from r18_oracle.branches.untaken import Source
from r18_oracle.cli import branches as command
from r18_oracle.search.profiles import profile
from support import ROOT

TOY = "branches_toy:Backend"
FILE = Path(branches_toy.__file__)
KERNEL = "toy/relu/maximum/fp32"


def line(text: str) -> int:
    """The line number of the toy's line with this text."""
    return [one.strip() for one in FILE.read_text().splitlines()].index(text) + 1


@pytest.fixture(scope="module")
def found() -> Measured:
    return measure(TOY, profile("quick"), network=None)


def entries(tmp_path: Path, listed: Sequence[dict[str, Any]]) -> Reasons:
    path = tmp_path / "reasons.json"
    path.write_text(json.dumps({"toy": listed}))
    return Reasons.of("toy", path)


def report(found: Measured, reasons: Reasons | None = None) -> Report:
    return judged(found, TOY, profile("quick"), reasons or Reasons("none"))


def test_what_no_problem_took_is_reported(found: Measured) -> None:
    def text(number: int) -> str:
        return FILE.read_text().splitlines()[number - 1].strip()

    far, small = line("if out.size == FAR:"), line("if out.size < FAR:")
    handler, loop = line("except ValueError:"), line("for _ in out.shape:")
    guard, many = line("if out.size != FAR:"), line("if problem.inputs[0][0] == FAR:")
    file = FILE.name
    assert [str(one) for one in report(found).without_reason] == [
        f"{file}:{far} → {far + 1}, relu: if out.size == FAR: → out[...] = 0",
        f"{file}:{small} → {small + 2}, relu: if out.size < FAR: → try:",
        f"{file}:{handler}, relu: never run: except ValueError:",
        f"{file}:{loop} → {line('unused()')}, checked: for _ in out.shape: → unused()",
        f"{file}:{guard} → {loop}, checked: if out.size != FAR: → for _ in out.shape:",
        f"{file}:{line('def unused() -> None:')}, unused: never called",
        f"{file}:{many} → {many + 1}, refuses: {text(many)} → {text(many + 1)}",
        "device function never: never launched",
    ]


def test_what_is_compiled_already_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cached kernels are compiled again, or the code that compiles them would not count as run."""
    monkeypatch.setenv("R18_CACHE", str(tmp_path))
    (tmp_path / "branches_toy").write_text("compiled")
    lines = measure("branches_toy:Caching", profile("brief"), network=None).lines[FILE]
    assert line('path.write_text("compiled")') in lines.ran
    hit = line("if not path.exists():"), line('path.write_text("compiled")') + 1
    assert hit in lines.taken


def test_each_has_its_kernels_and_an_entry(found: Measured) -> None:
    said = report(found)
    assert set(map(tuple, said.without_reason.values())) == {(KERNEL,)}
    assert said.device is not None
    assert not said.clean
    first, *_, last = said.to_json()["untaken"]
    assert first["entry"] == {
        "file": FILE.name,
        "scope": "relu",
        "line": "if out.size == FAR:",
        "to": "out[...] = 0",
        "reason": "",
    }
    assert last["entry"] == {"function": "never", "reason": ""}
    assert f"  of {KERNEL}" in said.text()


def test_with_reasons_it_is_silent(found: Measured, tmp_path: Path) -> None:
    listed = [one["entry"] | {"reason": "known"} for one in report(found).to_json()["untaken"]]
    said = report(found, entries(tmp_path, listed))
    assert said.clean
    assert set(said.reasons.values()) == {"known"}
    assert said.text().splitlines()[-1] == "  0 left out without a reason, 8 with one"


def test_an_entry_without_a_target_covers_every_branch_of_its_line(
    found: Measured, tmp_path: Path
) -> None:
    entry = {"file": FILE.name, "scope": "checked", "line": "for _ in out.shape:", "reason": "r"}
    said = report(found, entries(tmp_path, [entry]))
    assert len(said.reasons) == 1
    assert len(said.without_reason) == 7


@pytest.mark.parametrize(
    "entry",
    [
        {"file": FILE.name, "scope": "relu", "line": "if out.size == NEAR:"},
        {"file": FILE.name, "scope": "checked", "line": "if out.size == FAR:"},
        {"file": FILE.name, "scope": "relu", "line": "if out.size == FAR:", "to": "out[...] = 1"},
        {"file": "elsewhere.py", "scope": "relu", "line": "if out.size == FAR:"},
        {"function": "nowhere"},
    ],
)
def test_a_stale_reason_is_an_error(found: Measured, tmp_path: Path, entry: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"lists 1 line\(s\) or function\(s\) of '.*' that no"):
        report(found, entries(tmp_path, [{**entry, "reason": "known"}]))


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ([{"function": "never", "reason": " "}], "has no reason"),
        ([{"function": "never", "reason": "r"}] * 2, "is listed twice"),
        ([{"file": "a.py", "line": "x", "reason": "r"}], "needs a file, a scope and a line"),
        ([{"function": "never", "why": "r"}], "cannot read the reasons of"),
    ],
)
def test_a_damaged_list_is_refused(
    tmp_path: Path, listed: Sequence[dict[str, str]], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        entries(tmp_path, listed)


def test_without_its_device_a_kernel_is_asked_what_it_decides() -> None:
    said = branches("branches_toy:Away", network=None)
    assert said.device is None
    assert said.problems > 10
    scopes = {one.scope: one.called for one in said.without_reason if one.file}
    assert scopes == {"relu": False, "checked": False, "unused": False, "refuses": True}
    assert [one.text for one in said.without_reason if not one.file] == ["never"]


def test_a_kernel_that_says_nothing_without_its_device_is_not_available() -> None:
    with pytest.raises(BackendUnavailable, match="no device"):
        branches("branches_toy:Silent", network=None)


@pytest.mark.parametrize(
    ("backend", "said"),
    [("Failing", "full_write: "), ("Deadly", "crash: the worker process died of SIGABRT")],
)
def test_a_kernel_that_fails_is_named(backend: str, said: str) -> None:
    found = branches(f"branches_toy:{backend}", network=None)
    assert list(found.failed) == [KERNEL]
    assert f"{KERNEL} was stopped: {said}" in found.text()
    assert not found.clean


def test_names_that_are_not_there() -> None:
    with pytest.raises(UnknownName, match="numpi"):
        branches("numpi")
    with pytest.raises(BackendUnavailable, match="no module 'nothing_here'"):
        branches("nothing_here:Backend")
    with pytest.raises(UnknownName, match="quik"):
        branches(TOY, profile_name="quik")
    with pytest.raises(UnknownName, match="resnet19"):
        branches(TOY, network="resnet19")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, away = typer.Typer(), ["--backend", "branches_toy:Away"]
    app.command()(command.branches)
    done = CliRunner().invoke(app, [*away, "--json"])
    assert done.exit_code == 1
    listed = [one["entry"] | {"reason": "known"} for one in json.loads(done.stdout)["untaken"]]
    path = tmp_path / "reasons.json"
    path.write_text(json.dumps({"toy": listed}))
    assert CliRunner().invoke(app, [*away, "--reasons", str(path)]).exit_code == 0


@pytest.mark.parametrize("backend", ["cupy", "numba", "numba-cpu", "numpy", "torch"])
def test_the_lines_of_our_own_reasons_are_there(backend: str) -> None:
    root = ROOT / "backends" / f"r18_{backend.replace('-', '_')}"
    files = {path.relative_to(root).as_posix(): Source.of(path) for path in sources(root)}
    Reasons.of(backend).check(backend, files, labels=())
