"""Backends for runs under a sanitizer: one with a kernel that raises, one of several kernels."""

from __future__ import annotations

import time
from typing import Any

import cuda_toy
from mutation_toy import Backend as Right
from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import ReLU
from r18.graph.precision import FP32

CONTRACT = RoundingContract("exact", "float32", "float32")


def raises(op: ReLU, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
    """A kernel that raises, as on a device that is left in an error state."""
    raise RuntimeError("an illegal address")


def dawdles(op: ReLU, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
    time.sleep(5)  # eighteen calls: far longer than the first kernel, on a busy machine too


class Backend(Right):
    """A backend with one wrong ReLU kernel, which raises, and right kernels."""

    def kernels(self) -> tuple[HostKernel, ...]:
        wrong = HostKernel("toy", ReLU, "raises", FP32, CONTRACT, run=raises)
        return (wrong, *super().kernels())


class Several(cuda_toy.Backend):
    """A backend with one ReLU from a `.cu` source under three names."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return tuple(
            cuda_toy.Compiled("toy", ReLU, name, FP32, CONTRACT, run=cuda_toy.run)
            for name in ("a", "b", "c")
        )


class Slow(Right):
    """A backend whose ReLU takes longer than the time limit."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return (
            HostKernel("toy", ReLU, "slow", FP32, CONTRACT, run=dawdles),
            *super().kernels(),
        )
