"""Backends without a device whose schedule can be perturbed: a variable decides what is late."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

import cuda_toy
import r18_numpy
from r18.backend import Array, DeviceInfo, Plan, Program, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import ReLU
from r18.graph.precision import FP32

KINDS = ("wait", "copy", "host")
LATE: dict[str, Any] = {"seed": None, "kinds": ()}
CONTRACT = RoundingContract("exact", "float32", "float32")
RACY, FATAL = 3, 4
"""The seeds that show a race, and that end the process."""


def late(seed: int, kind: str) -> bool:
    return LATE["seed"] == seed and kind in LATE["kinds"]


def set_late(seed: int | None, kinds: Collection[str] | None) -> tuple[str, ...]:
    LATE.update(seed=seed, kinds=KINDS if kinds is None else tuple(kinds))
    return KINDS


def right(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    np.maximum(inputs[0], 0, out=out)


def races(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    """A ReLU whose last element is not copied in time."""
    right(op, inputs, weights, out, workspace)
    if late(RACY, "copy"):
        out.reshape(-1)[-1:] = 7


def raises(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    right(op, inputs, weights, out, workspace)
    if late(RACY, "wait"):
        raise RuntimeError("an illegal address")


def dies(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    right(op, inputs, weights, out, workspace)
    if late(FATAL, "wait"):
        os.kill(os.getpid(), signal.SIGKILL)


def wrong(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    out[...] = inputs[0]


class Backend(cuda_toy.Backend):
    """A backend with several ReLU kernels."""

    name = "perturbed-toy"
    runs: tuple[Callable[..., None], ...] = (right, races, dies)

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cuda", "A Toy (sm_90)")

    def kernels(self) -> tuple[HostKernel, ...]:
        return tuple(
            cuda_toy.Compiled("toy", ReLU, run.__name__, FP32, CONTRACT, run=run)
            for run in self.runs
        )

    def perturb(self, seed: int | None, kinds: Collection[str] | None = None) -> tuple[str, ...]:
        return set_late(seed, kinds)


class Wrong(Backend):
    """A backend whose kernels raise, or are wrong without any delay."""

    runs = (raises, wrong)


class Forgetful(Program):
    """A program that launches its second batch before it has arrived."""

    def load(self, images: Array) -> None:
        if not (late(RACY, "host") and self._ran):
            super().load(images)


class Programs(r18_numpy.Backend):
    """NumPy's kernels, in programs that can be perturbed."""

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cuda", "A Toy (sm_90)")

    def program(self, plan: Plan, weights: Mapping[str, Array]) -> Program:
        return Forgetful(self, plan, weights)

    def perturb(self, seed: int | None, kinds: Collection[str] | None = None) -> tuple[str, ...]:
        return set_late(seed, kinds)
