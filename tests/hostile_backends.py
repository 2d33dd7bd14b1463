"""Backends that leave traces in their process, which a test then inspects."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from faulty_backends import Right, kernel
from r18.backend import Kernel
from r18.graph.ops import ReLU

HANGING = "R18_TEST_HANGING"
"""The variable with a file in which a hanging kernel writes the id of its process."""


def hang(*call: Any) -> None:
    Path(os.environ[HANGING]).write_text(str(os.getpid()))
    time.sleep(600)


class Hangs(Right):
    """A backend with nothing but a ReLU that hangs."""

    def kernels(self) -> tuple[Kernel, ...]:
        return (kernel(ReLU, hang),)
