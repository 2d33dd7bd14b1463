"""tools/compare_trees.py: processes of several checkouts, run in turns."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from r18.graph.passes import fuse
from r18.graph.resnet import tiny
from support import tool_module

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--backend=numpy", "--network=tiny", "--milliseconds=1", "--rounds=3")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tool_module("compare_trees")


@pytest.fixture
def processes(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that the tool starts."""
    found: list[Any] = []

    class Popen(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(tool.subprocess, "Popen", Popen)
    return found


def test_each_tree_and_each_step_has_its_times(
    tool: ModuleType, processes: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = ROOT / "tests" / ".."
    assert tool.main([*SMALL, "--steps", str(ROOT), str(other)]) == 0
    runs, steps = capsys.readouterr().out.split("\n\n")
    assert runs.splitlines()[2].split()[0] == str(ROOT)
    assert runs.splitlines()[2].split()[2:] == ["1.000", "1.000-1.000"]
    assert runs.splitlines()[3].split()[0] == str(other)
    lines = [line.split() for line in steps.splitlines()[2:]]
    assert [name for name, *_ in lines] == [step.name for step in fuse(tiny(), "all").steps]
    assert all(float(time) > 0 for _, *times in lines for time in times)
    assert [process.poll() is None for process in processes] == [False, False]


def test_quartiles_are_of_the_times_over_the_first_trees_in_the_same_round(
    tool: ModuleType,
) -> None:
    first = tool.Tree("before", None, ["a"], [(10.0, [1.0]), (20.0, [2.0]), (40.0, [9.0])])
    second = tool.Tree("after", None, ["b", "a"], [(5.0, [0, 4.0]), (20.0, [0, 5]), (80.0, [0, 6])])
    text = tool.report([first, second])
    assert [line.split() for line in text.splitlines()[2:4]] == [
        ["before", "20.0", "1.000", "1.000-1.000"],
        ["after", "20.0", "1.000", "0.500-2.000"],
    ]
    assert text.splitlines()[-1].split() == ["a", "2.0", "5.0"]


def test_a_tree_that_does_not_run_ends_all(
    tool: ModuleType, processes: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "r18"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('broken')")
    assert tool.main([*SMALL, str(ROOT), str(tmp_path)]) == tool.REFUSED
    error = capfd.readouterr().err
    assert "ImportError: broken" in error
    assert f"{tmp_path} ended with exit code 1" in error
    assert [process.poll() is None for process in processes] == [False, False]


def test_what_is_refused(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(ROOT / "docs"), str(ROOT)]) == tool.REFUSED
    assert "docs is no checkout: it has no r18/__init__.py" in capsys.readouterr().err
    for arguments in ([str(ROOT)], [str(ROOT), str(ROOT), "--rounds", "0"]):
        with pytest.raises(SystemExit):
            tool.main(arguments)
        assert "needs two trees, and rounds, a batch and a turn above 0" in capsys.readouterr().err
