"""`python -m r18` is the command, and the tool that counts phrases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import r18
from support import ROOT

TOOL = ROOT / "tools" / "count_words.py"


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_module_runs_the_command() -> None:
    done = python("-m", "r18", "--version")
    assert (done.returncode, done.stdout) == (0, f"r18 {r18.__version__}\n")
    done = python("-m", "r18", "schedule", "--network", "none")
    assert done.returncode == 2
    assert done.stderr.startswith("r18: unknown network 'none'")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One line stands beside another.\n", 1),
        ("Besides, nobody is\nasked.\n", 3),
        ("the parts of\n    # which it is made\n", 1),
        ("def beside(self): ...\nbackend.beside(x)\nbeside=True\n", 0),
        ("what it relies on, and a layout\n", 0),
    ],
)
def test_phrases_are_counted(text: str, count: int, tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(text, "utf-8")
    done = python(TOOL, "--limit", "0", page)
    assert done.returncode == bool(count)
    rate = 1e3 * count / text.count("\n")
    assert done.stdout.endswith(
        f"{count} in {text.count(chr(10))} lines: {rate:.2f} per thousand lines\n"
    )


def test_tests_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("# beside\n", "utf-8")
    (tmp_path / "it.cuh").write_text("// beside\n", "utf-8")
    done = python(TOOL, "--show", tmp_path)
    assert done.returncode == 0
    assert "it.cuh:1: // beside\n" in done.stdout
    assert "test_it" not in done.stdout
