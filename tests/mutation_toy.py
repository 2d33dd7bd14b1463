"""A backend of one kernel, for mutation runs; `HINT` is code that no kernel uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.backend import Array, DeviceInfo, RoundingContract
from r18.backend import Backend as BackendBase
from r18.backend.host import HostKernel, HostMemory, HostStream
from r18.graph.ops import ReLU
from r18.graph.precision import FP32

HINT = 8


def relu(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Array) -> None:
    np.maximum(inputs[0], 0, out=out)


class Backend(BackendBase):
    """ReLU, right."""

    name = "toy"

    def __init__(self) -> None:
        self.memory = HostMemory()

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "a toy")

    def kernels(self) -> tuple[HostKernel, ...]:
        contract = RoundingContract("exact", "float32", "float32")
        return (HostKernel("toy", ReLU, "maximum", FP32, contract, run=relu),)

    def stream(self) -> HostStream:
        return HostStream()


class Wrong(Backend):
    """ReLU that is not computed."""

    def kernels(self) -> tuple[HostKernel, ...]:
        contract = RoundingContract("exact", "float32", "float32")
        return (HostKernel("toy", ReLU, "maximum", FP32, contract, run=nothing),)


def nothing(op: ReLU, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
    """Leave the output as it was."""
