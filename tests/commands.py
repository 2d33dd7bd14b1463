"""The command line in this process: arguments in; stdout, stderr and an exit code out."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from r18.cli.app import main


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def r18(*arguments: object) -> Done:
    """Runs `r18 ARGUMENTS`, as the console script does."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["r18", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())
