"""The command line in this process, and the tools: arguments in; stdout, stderr and an exit code
out."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from r18.cli.app import main
from support import ROOT


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def r18(*arguments: object) -> Done:
    """Runs `r18 ARGUMENTS`, as the console script does."""
    return _done(["r18", *map(str, arguments)], main)


def tool(name: str, *arguments: object) -> Done:
    """Runs `python tools/NAME.py ARGUMENTS` in this process, without the seconds of importing
    PyTorch again. Whether a tool imports what it needs has to be tested in a process of its own."""
    path = str(ROOT / "tools" / f"{name}.py")

    def run() -> None:
        runpy.run_path(path, run_name="__main__")
        raise SystemExit

    return _done([path, *map(str, arguments)], run)


def _done(argv: list[str], run: Callable[[], None]) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", argv),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        run()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())
