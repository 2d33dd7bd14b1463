"""Backends that are wrong in known ways, for `r18 verify` to find; the rest of each is right.

They are mended, in worker processes too, while the file exists that the environment variable
`MENDED` names.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from r18.backend import Array, DeviceInfo, RoundingContract
from r18.backend import Backend as BackendBase
from r18.backend.host import HostKernel, HostMemory, HostStream
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
    Problem,
    ReLU,
    Softmax,
)
from r18.graph.precision import FP32
from support import compute

MENDED = "R18_TEST_MENDED"

CONTRACTS: dict[type[Op], str] = {
    Conv2d: "sum",
    BatchNorm: "batchnorm",
    ReLU: "exact",
    Add: "elementwise",
    MaxPool2d: "exact",
    GlobalAvgPool: "mean",
    Linear: "sum",
    Softmax: "softmax",
}

Arrays = tuple[Array, ...]
Run = Any  # a function as `HostKernel` takes one


def mended() -> bool:
    return Path(os.environ.get(MENDED, "none")).exists()


def right(op: Op, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    out[...] = compute(op, inputs, weights)


def kernel(op: type[Op], run: Run = right, algorithm: str = "plain") -> HostKernel:
    """A kernel in float32; with a function other than `right` it is wrong until it is mended."""

    def until_mended(*arguments: Any) -> None:
        (right if mended() else run)(*arguments)

    contract = RoundingContract(CONTRACTS[op], "float32", "float32")
    return HostKernel("faulty", op, algorithm, FP32, contract, run=until_mended)


class Right(BackendBase):
    """A backend with a right kernel for every op of the network."""

    name = "faulty"

    def __init__(self) -> None:
        self.memory = HostMemory()

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "plain NumPy")

    def stream(self) -> HostStream:
        return HostStream()

    def kernels(self) -> tuple[HostKernel, ...]:
        """Right kernels, then `more()`: programs use an op's first kernel, which takes all
        problems."""
        return (*(kernel(op) for op in CONTRACTS if op not in self.instead()), *self.more())

    def instead(self) -> dict[type[Op], Run]:
        return {}

    def more(self) -> tuple[HostKernel, ...]:
        return tuple(kernel(op, run) for op, run in self.instead().items())


# -- one backend with many faults --------------------------------------------------------------


def pooled_short(
    op: MaxPool2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """A max-pooling that leaves out the last column of the window."""
    kh, kw = op.kernel_size
    narrow = replace(op, kernel_size=(kh, max(1, kw - 1)))
    out[...] = compute(narrow, inputs, weights)[..., : out.shape[3]]


def one_less(
    op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    """A global average pooling that divides by HW − 1."""
    _, _, h, w = inputs[0].shape
    out[...] = inputs[0].sum(axis=(2, 3)) / np.float32(max(1, h * w - 1))


def swapped(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    """A convolution that exchanges the strides of height and width."""
    turned = replace(op, stride=op.stride[::-1], residual=False, relu=False)
    total = np.resize(compute(turned, inputs[:1], weights), out.shape)
    residual = inputs[1] if op.residual else np.zeros_like(total)
    out[...] = compute(Add(op.relu), (total, residual), ())


def crash(*arguments: Any) -> None:
    ctypes.string_at(0)


def sleep(*arguments: Any) -> None:
    time.sleep(600)


def fail(*arguments: Any) -> None:
    raise MemoryError("out of device memory\a")


def not_until_mended(problem: Problem) -> str | None:
    return None if mended() else "not today"


class Faulty(Right):
    """A backend whose max-pooling is wrong in the network; its other faults are in no program."""

    def instead(self) -> dict[type[Op], Run]:
        return {MaxPool2d: pooled_short}

    def kernels(self) -> tuple[HostKernel, ...]:
        """The kernels, with the hanging one first, so that a run has other work while it hangs."""
        return (kernel(ReLU, sleep, "sleeping"), *super().kernels())

    def more(self) -> tuple[HostKernel, ...]:
        idle = replace(kernel(GlobalAvgPool, right, "idle"), refuses=not_until_mended)
        return (
            *super().more(),
            kernel(Softmax, crash, "crashing"),
            kernel(Add, fail, "raising"),
            kernel(GlobalAvgPool, one_less, "one_less"),
            kernel(Conv2d, swapped, "swapped"),
            idle,
        )


# -- faults of programs ------------------------------------------------------------------------


def crash_in_a_batch(op: Op, inputs: Arrays, *rest: Any) -> None:
    """A kernel that crashes on the tiny network's pooling of two images."""
    if inputs[0].shape == (2, 8, 16, 16):
        crash()
    right(op, inputs, *rest)


class CrashingProgram(Right):
    """A backend that passes the search and crashes in the network, which runs with more images."""

    def instead(self) -> dict[type[Op], Run]:
        return {MaxPool2d: crash_in_a_batch}


class RaisingProgram(Right):
    """A backend that fails to compile any program."""

    def compile(self, *arguments: Any, **options: Any) -> Any:
        if mended():
            return super().compile(*arguments, **options)
        raise MemoryError("out of device memory")


# -- nothing -----------------------------------------------------------------------------------


class Refusing(Right):
    """A backend whose kernels refuse every problem."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return tuple(replace(k, refuses=lambda problem: "not today") for k in super().kernels())


class WithoutSoftmax(Right):
    """A backend without softmax, in which a network may end."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return tuple(k for k in super().kernels() if mended() or k.op is not Softmax)
