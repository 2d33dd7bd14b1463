"""Kernels that fork, leave children, or raise what cannot be quoted, examined in a worker."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import faulty_backends
from r18.backend import Kernel
from r18.graph.ops import ReLU
from r18_oracle.check.checks import examine
from r18_oracle.findings import Failed, Finding
from worker_tasks import Announce, Unprintable, problem


def _forks(*call: Any) -> None:
    os.fork()
    faulty_backends.right(*call)


def _leaves_a_child(*call: Any) -> None:
    subprocess.Popen(["sleep", "600"])
    faulty_backends.right(*call)


def _raises_the_unprintable(*call: Any) -> None:
    raise Unprintable


def _raises_at_length(*call: Any) -> None:
    raise RuntimeError("x" * 50_000_000)


KERNELS = (_forks, _leaves_a_child, _raises_the_unprintable, _raises_at_length)


class Hostile(faulty_backends.Right):
    """A ReLU for each of `KERNELS`."""

    def kernels(self) -> tuple[Kernel, ...]:
        hostile = (
            faulty_backends.kernel(ReLU, run, run.__name__.strip("_").replace("_", "-"))
            for run in KERNELS
        )
        return tuple(hostile)


def examined(announce: Announce, index: int) -> Finding | None:
    """The finding of one of `KERNELS`."""
    backend = Hostile()
    try:
        examine(backend, backend.kernels()[index], problem(5), 0, announce=announce)
    except Failed as failure:
        return failure.finding
    return None
