"""A backend whose ReLU has branches that no problem takes and functions that are never launched."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from mutation_toy import Backend as Plain
from r18.backend import Array, DeviceInfo, RoundingContract
from r18.backend.host import HostKernel
from r18.errors import BackendUnavailable
from r18.graph.ops import Problem, ReLU
from r18.graph.precision import FP32
from r18.machine import cache_folder

FAR = 987_654_321


def relu(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    if out.size == FAR:
        out[...] = 0
    if out.size < FAR:
        np.maximum(inputs[0], 0, out=out)
    try:
        checked(out)
    except ValueError:
        out[...] = 0


def checked(out: Array) -> None:
    """Does nothing unless an output has `FAR` elements."""
    for _ in out.shape:
        if out.size != FAR:
            return
    unused()


def unused() -> None:
    raise ValueError


def refuses(problem: Problem) -> str | None:
    if problem.inputs[0][0] == FAR:
        return "not so many"
    return None


class Compiled(HostKernel):
    """A kernel with three device functions: for few elements, for more, and one never launched."""

    @property
    def variant_of(self) -> str | None:  # type: ignore[override]
        """A property, as the protocol allows; only plans read it."""
        return None

    def function_labels(self, problem: Problem | None = None) -> tuple[str, ...]:
        if problem is None:
            return "few", "many", "never"
        return ("few",) if problem.inputs[0][-1] < 3 else ("many",)


class Backend(Plain):
    """The backend with a correct ReLU."""

    def kernels(self) -> tuple[HostKernel, ...]:
        contract = RoundingContract("exact", "float32", "float32")
        return (Compiled("toy", ReLU, "maximum", FP32, contract, run=relu, refuses=refuses),)


class Caching(Backend):
    """A backend whose kernel keeps a file in the folder for compiled code."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return tuple(replace(kernel, run=cached) for kernel in super().kernels())


class Failing(Backend):
    """A backend whose kernel writes nothing and declares no device functions."""

    def kernels(self) -> tuple[HostKernel, ...]:
        (right,) = super().kernels()
        return (HostKernel("toy", ReLU, "maximum", FP32, right.contract, run=nothing),)


class Deadly(Failing):
    """A backend whose kernel ends the process."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return tuple(replace(kernel, run=abort) for kernel in super().kernels())


def cached(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    path = cache_folder() / "branches_toy"
    if not path.exists():
        path.write_text("compiled")
    np.maximum(inputs[0], 0, out=out)


def nothing(*arguments: Any) -> None:
    """A kernel function that writes nothing."""


def abort(*arguments: Any) -> None:
    os.abort()


class Away(Backend):
    """A backend whose device is missing."""

    def probe(self) -> DeviceInfo:
        raise BackendUnavailable("toy", "no device", "Plug it in.")


class Silent(Away):
    """A backend without a device that does not say what it would launch."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return Failing().kernels()
