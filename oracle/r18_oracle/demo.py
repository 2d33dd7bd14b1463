"""A backend for demonstrations: one right kernel and four wrong ones, a few lines each.

    $ r18 verify --backend r18_oracle.demo:Backend

passes `relu` and reports a finding for each of the others.
"""

from __future__ import annotations

import numpy as np

from r18.backend import Array, DeviceInfo, RoundingContract
from r18.backend import Backend as BackendBase
from r18.backend.host import HostFunction, HostKernel, HostMemory, HostStream
from r18.graph.ops import Add, BatchNorm, GlobalAvgPool, Linear, Op, ReLU
from r18.graph.precision import FP32

Arrays = tuple[Array, ...]


def relu(op: ReLU, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    np.maximum(inputs[0], 0, out=out)


def first_input_twice(
    op: Add, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    np.add(inputs[0], inputs[0], out=out)
    if op.relu:
        np.maximum(out, 0, out=out)


def variance_as_deviation(
    op: BatchNorm, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    weight, bias, mean, var = (w[:, None, None] for w in weights)
    out[...] = (inputs[0] - mean) / (var + op.eps) * weight + bias


def divisor_of_imagenet(
    op: GlobalAvgPool, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    np.divide(inputs[0].sum(axis=(2, 3)), 7 * 7, out=out)


def tail_ignored(op: Linear, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    whole = op.in_features // 4 * 4
    out[...] = inputs[0][:, :whole] @ weights[0][:, :whole].T + weights[1]


def _kernel(op: type[Op], name: str, algorithm: str, run: HostFunction) -> HostKernel:
    return HostKernel(
        "demo", op, name, FP32, RoundingContract(algorithm, "float32", "float32"), run
    )


class Backend(BackendBase):
    """The kernels of this module on the host."""

    name = "demo"

    def __init__(self) -> None:
        self.memory = HostMemory()

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "a demonstration of wrong kernels")

    def kernels(self) -> tuple[HostKernel, ...]:
        return (
            _kernel(ReLU, "right", "exact", relu),
            _kernel(Add, "first_input_twice", "elementwise", first_input_twice),
            _kernel(BatchNorm, "variance_as_deviation", "batchnorm", variance_as_deviation),
            _kernel(GlobalAvgPool, "divisor_of_imagenet", "mean", divisor_of_imagenet),
            _kernel(Linear, "tail_ignored", "sum", tail_ignored),
        )

    def stream(self) -> HostStream:
        return HostStream()


__all__ = ["Backend"]
