"""Tasks for worker processes: one that works, and each way in which device work goes wrong."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis.configuration import storage_directory

from r18.graph.ops import Problem, ReLU
from r18_oracle import stacks

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


def die_in_silence(announce: Announce) -> None:
    os._exit(8)


def start_method(announce: Announce) -> str:
    return multiprocessing.get_start_method()


def fail(announce: Announce) -> None:
    raise RuntimeError("the oracle's own fault")


class TwoParts(Exception):
    """An exception that pickle cannot make again from its message."""

    def __init__(self, whose: str, what: str) -> None:
        super().__init__(f"{whose}, {what}")


def fail_in_its_own_way(announce: Announce) -> None:
    raise TwoParts("the oracle's", "own fault")


def hypothesis_home(announce: Announce) -> str:
    """The folder in which Hypothesis stores things, after storing one."""
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


# -- what isolation is for ---------------------------------------------------------------------


def real_time_signal(announce: Announce, number: int) -> None:
    announce(problem(7), "normal", 11)
    os.kill(os.getpid(), signal.SIGRTMIN + number)


def prints(announce: Announce) -> str:
    print("from Python")
    os.write(1, b"from C\n")
    print("to the last stdout", file=sys.__stdout__, flush=True)
    return "done"


class Unprintable(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no text")


def fail_without_words(announce: Announce) -> None:
    raise Unprintable


def fail_at_length(announce: Announce) -> None:
    raise RuntimeError("x" * 50_000_000)


def answer_at_length(announce: Announce) -> str:
    announce(problem(8), "normal", 12)
    return "x" * 50_000_000


def write_to_the_pipe(announce: Announce) -> None:
    """Writes to the worker's pipe, as a kernel may that writes to a wrong descriptor."""
    announce(problem(9), "normal", 13)
    frame: Any = sys._getframe()
    while "pipe" not in frame.f_locals:
        frame = frame.f_back
    os.write(frame.f_locals["pipe"].fileno(), b"\0\0\0\x04junk")
    time.sleep(600)


def take_memory(announce: Announce, nbytes: int) -> None:
    announce(problem(10), "normal", 14)
    held = np.ones(nbytes, np.uint8)
    time.sleep(600)
    del held


def leave_a_child_and_die(announce: Announce, file: str) -> None:
    """Leaves a child that holds the pipe, since a fork inherits it."""
    announce(problem(11), "normal", 15)
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    with open(file, "w") as stream:
        stream.write(str(child))
    os._exit(5)


KEPT: list[int] = []


def keep(announce: Announce, number: int) -> tuple[list[int], dict[str, str], list[str]]:
    """Earlier jobs of this process, its variables, and the loaded backends."""
    KEPT.append(number)
    return list(KEPT), dict(os.environ), [name for name in sys.modules if name in BACKENDS]


# -- hanging -----------------------------------------------------------------------------------


def loop(announce: Announce) -> None:
    """Hangs in Python, in another function."""
    announce(problem(12), "normal", 16)
    _turn()


def _turn() -> None:
    while True:
        time.sleep(0.01)


def pause(announce: Announce) -> None:
    """Hangs in C with the interpreter's lock: no other thread of Python can run."""
    announce(problem(12), "normal", 16)
    while True:
        ctypes.PyDLL(None).pause()


def deadlock(announce: Announce) -> None:
    """Hangs in C without the interpreter's lock; another thread waits too."""
    announce(problem(12), "normal", 16)
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=_wait_for, args=(lock,), daemon=True).start()
    lock.acquire()


def _wait_for(lock: threading.Lock) -> None:
    lock.acquire()


def in_depth(announce: Announce, calls: int = 150) -> None:
    """Hangs below more calls than `faulthandler` writes."""
    if calls:
        return in_depth(announce, calls - 1)
    return loop(announce)


def ignore(announce: Announce) -> None:
    announce(problem(12), "normal", 16)
    signal.signal(stacks.SIGNAL, signal.SIG_IGN)
    time.sleep(600)


def handle(announce: Announce) -> None:
    announce(problem(12), "normal", 16)
    signal.signal(stacks.SIGNAL, lambda number, frame: None)
    time.sleep(600)


def block(announce: Announce) -> None:
    announce(problem(12), "normal", 16)
    signal.pthread_sigmask(signal.SIG_BLOCK, {stacks.SIGNAL})
    time.sleep(600)


def spoil_the_slate(announce: Announce, folder: str, how: str) -> None:
    """Announce a problem, spoil the slates' files, announce another problem, and die."""
    announce(problem(13), "normal", 17)
    for file in Path(folder).glob("slate-*"):
        if how == "remove":
            file.unlink()
        elif how == "empty":
            os.truncate(file, 0)
        else:
            file.write_bytes(b"\xff" * 10_000)
    announce(problem(14), "normal", 18)
    os._exit(6)


def announce_at_length(announce: Announce, short: int) -> None:
    """Announces more than an entry of a slate holds; with `short`, then a short entry."""
    announce(problem(15), "normal", 19)
    announce(problem(16), "x" * 10_000, 20)
    if short:
        announce(problem(17), "normal", 21)
    os._exit(7)


def remove_the_answer(announce: Announce, folder: str) -> None:
    announce(problem(12), "normal", 16)
    os.remove(f"{folder}/stacks-{os.getpid()}")
    time.sleep(600)


BACKENDS = ("r18_numpy", "r18_torch", "r18_numba", "r18_numba_cpu", "r18_cupy", "cupy", "numba")
