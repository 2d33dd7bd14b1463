"""Backends on which `r18 verify` and the conformance suite must agree."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from faults.conv import linear
from faults.fault import HostBackend, kernel
from faults.others import of_inputs, relu
from r18.backend import Array, RoundingContract
from r18.graph.ops import Linear, Problem, ReLU

Arrays = tuple[Array, ...]


def _in_float64(op: Linear, inputs: Arrays, weights: Arrays, out: Array, scratch: Array) -> None:
    wide = inputs[0].astype(np.float64) @ weights[0].astype(np.float64).T
    out[...] = wide + weights[1].astype(np.float64)


def _chatty(op: Any, inputs: Arrays, weights: Arrays, out: Array, scratch: Array) -> None:
    print("{ a kernel speaks")
    os.write(1, b"[ and so does its library\n")
    out[...] = relu(op, inputs[0])


def _remarks(problem: Problem) -> str | None:
    print("{ a refusal, which this process asks for too")
    os.write(1, b"[ and so does its library\n")
    return None


def _wrong(op: Any, inputs: Arrays, weights: Arrays, out: Array, scratch: Array) -> None:
    out[...] = relu(op, inputs[0]) + (inputs[0] > 2)


SHARP = RoundingContract("sum", "float64", "float32")
TYPO = RoundingContract("exakt", "float32", "float32")


class Twice(HostBackend):
    """Two kernels of one id."""

    def __init__(self) -> None:
        super().__init__([kernel("alike", ReLU, "plain", of_inputs(relu)) for _ in range(2)])


class Chatty(HostBackend):
    def __init__(self) -> None:
        super().__init__([kernel("alike", ReLU, "chatty", _chatty, refuses=_remarks)])


class Sharp(HostBackend):
    """Kernels that claim float64 sums in fp32: one keeps the contract, one breaks it."""

    def __init__(self) -> None:
        super().__init__(
            [
                kernel("alike", Linear, "in_float64", _in_float64, contract=SHARP),
                kernel("alike", Linear, "in_float32", linear, contract=SHARP),
            ]
        )


class Typo(HostBackend):
    def __init__(self) -> None:
        super().__init__([kernel("alike", ReLU, "plain", of_inputs(relu), contract=TYPO)])


class Known(HostBackend):
    """One right kernel and one with a known fault."""

    def __init__(self) -> None:
        wrong = kernel("alike", ReLU, "wrong", _wrong)
        super().__init__([kernel("alike", ReLU, "plain", of_inputs(relu)), wrong])
