"""Isolation of a worker process from its parent: streams, signals, children, memory.

This contains accidents. It is no sandbox: a kernel can do whatever the user can do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil

from r18.errors import UsageError
from r18.machine import memory_nbytes

MEMORY = "R18_WORKER_MEMORY"
"""The variable that limits the memory of all workers of a pool together, in GiB."""
SHARE = 0.8
"""Without the variable: this share of the machine's memory, or of its container's."""
GIB = 2**30

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def memory_limit() -> int:
    """Bytes that all workers of a pool may use together. Raises `UsageError`."""
    asked = os.environ.get(MEMORY, "")
    if not asked:
        return int(SHARE * memory_nbytes())
    try:
        nbytes = float(asked) * GIB
    except ValueError:
        nbytes = 0.0
    if not 0 < nbytes < float("inf"):
        raise UsageError(f"{MEMORY} is a number of GiB above 0, got '{asked[:200]}'")
    return int(nbytes)


# -- in the worker -----------------------------------------------------------------------------


def leave_parent() -> None:
    """Called once by a worker, before it imports what a job needs.

    Afterwards prints go to stderr, since stdout may be a pipe of JSON. The worker is the leader
    of a process group without a terminal, so Ctrl-C reaches only the parent, and all that the
    worker starts can be ended with it. On Linux the worker dies with its parent, and adopts the
    processes that its own children leave.
    """
    with suppress(OSError):  # there may be no stderr
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None).prctl
            prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            prctl(_SET_CHILD_SUBREAPER, 1)
    if hasattr(os, "setsid"):
        with suppress(OSError):  # it may lead a session already
            os.setsid()
        # A Ctrl-C from before was for the parent: ignoring the signal drops it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)


# -- in the parent -----------------------------------------------------------------------------


def memory_of(leaders: Iterable[int]) -> dict[int, int]:
    """Bytes in memory of each worker and its process group; shared pages count for each."""
    held = dict.fromkeys(leaders, 0)
    for pid in psutil.pids() if hasattr(os, "getpgid") else list(held):
        with suppress(OSError, psutil.Error):  # it may have ended
            leader = pid if pid in held else os.getpgid(pid)
            if leader in held:
                held[leader] += psutil.Process(pid).memory_info().rss
    return held
