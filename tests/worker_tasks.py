"""Tasks for worker processes: one that works, and each way in which device work goes wrong."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis.configuration import storage_directory

from r18.graph.ops import Problem, ReLU

Announce = Callable[[Problem, str, int], None]


def problem(width: int) -> Problem:
    return Problem(ReLU(), ((1, width),))


def double(announce: Announce, number: int) -> int:
    announce(problem(2), "normal", number)
    return 2 * number


def segmentation_fault(announce: Announce) -> None:
    announce(problem(3), "edges", 7)
    ctypes.string_at(0)


def hang(announce: Announce) -> None:
    announce(problem(4), "exact", 8)
    time.sleep(600)


def leave(announce: Announce) -> None:
    announce(problem(5), "normal", 9)
    os._exit(3)


def killed(announce: Announce) -> None:
    announce(problem(6), "normal", 10)
    os.kill(os.getpid(), 9)


def fail(announce: Announce) -> None:
    raise RuntimeError("the oracle's own fault")


class TwoParts(Exception):
    """It cannot be made again from its message, as pickle does."""

    def __init__(self, whose: str, what: str) -> None:
        super().__init__(f"{whose}, {what}")


def fail_in_its_own_way(announce: Announce) -> None:
    raise TwoParts("the oracle's", "own fault")


def hypothesis_home(announce: Announce) -> str:
    """Where Hypothesis keeps things, having kept one."""
    folder = storage_directory("constants")
    folder.create_if_missing()
    return str(folder.home_directory)


def variables(announce: Announce) -> dict[str, str]:
    return dict(os.environ)


@dataclass(frozen=True)
class Spent:
    process_id: int
    spent: bool = True


def spent(announce: Announce) -> Spent:
    return Spent(os.getpid())


def process_id(announce: Announce) -> int:
    return os.getpid()
