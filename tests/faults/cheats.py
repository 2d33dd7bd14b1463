"""Kernels that do not compute their op, and try to pass all the same.

A cheat is made again for each campaign, as many of them remember. Those of `FATAL` end or hang
their process and are only for workers; `HOLLOW` ones never run, so no check sees them, and a
campaign's verdict must; `LARGE` ones are right on drawn problems, and wrong on the network's
problems. Against a kernel that rewrites the oracle's own code in memory only a process of its own
would help: what is written to disk is then judged by another.
"""

from __future__ import annotations

import ctypes
import os
import time

from faults.answers import ANSWERS
from faults.cheat import Cheat, after, always, cheat
from faults.conv import CONV
from faults.fault import HostBackend
from faults.others import add
from faults.tampering import TAMPERING
from r18.backend import Array
from r18.graph.ops import Add, Conv2d, ReLU

Arrays = tuple[Array, ...]

CHEATS: tuple[Cheat, ...] = (*ANSWERS, *TAMPERING)


# -- what no check on a drawn problem sees -----------------------------------------------------


def _small_only(op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    out[...] = add(op, *inputs)
    out.reshape(-1)[100_000:] = 0


LARGE = (
    cheat(
        Add,
        "small_only",
        "declares no edges, and is wrong beyond 100,000 elements",
        "exact bound",
        always(_small_only),
    ),
)
"""Cheats that only the network's own problems reveal."""

HOLLOW = (
    cheat(
        Conv2d,
        "refuses_all",
        "refuses every problem, so that none fails",
        "refused",
        always(CONV),
        refuses=lambda problem: "not today",
    ),
    cheat(
        Conv2d,
        "refuses_large",
        "takes the smallest problems alone",
        "uncovered",
        always(CONV),
        refuses=lambda problem: "too large" if problem.macs > 10_000 else None,
    ),
)
"""Cheats that never run: the campaign's verdict and `campaign.uncovered` reveal them."""

FATAL = (
    cheat(ReLU, "hangs", "never comes back", "hang", after(lambda: time.sleep(3600))),
    cheat(ReLU, "crashes", "reads address 0", "crash", after(lambda: ctypes.string_at(0))),
    cheat(ReLU, "leaves", "ends its process, without error", "crash", after(lambda: os._exit(0))),
)
"""Cheats for worker processes only."""


class Backend(HostBackend):
    """The fatal cheats, as a backend that a worker can load by name."""

    name = "cheat"

    def __init__(self) -> None:
        super().__init__([cheat.make() for cheat in FATAL])


__all__ = ["CHEATS", "FATAL", "HOLLOW", "LARGE", "Backend", "Cheat"]
