"""The plan of a program, as data: kernels in order, and the place of every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r18.backend.kernel import Kernel
from r18.backend.options import CompileOptions
from r18.graph.ops import Layout, Problem, Shape
from r18.graph.schedule import Schedule


@dataclass(frozen=True)
class Tensor:
    """A value in memory: its layout, dtype and offset in the arena."""

    value: str
    shape: Shape  # logical
    layout: Layout
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.shape, self.dtype)


def tensor_nbytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Bytes of a dense tensor, exactly: NumPy's integers, which wrap, count as Python's."""
    return math.prod(map(int, shape)) * dtype.itemsize


@dataclass(frozen=True)
class PlannedStep:
    """One launch: a kernel on a problem, between named tensors of the plan.

    beside: it may run at the same time as the step before it.
    """

    name: str
    problem: Problem
    kernel: Kernel
    inputs: tuple[str, ...]  # keys of Plan.tensors
    output: str
    weights: tuple[str, ...]
    workspace_nbytes: int
    workspace_offset: int
    beside: bool = False


@dataclass(frozen=True)
class Plan:
    """The steps and memory of a program, before any device is touched."""

    backend: str
    schedule: Schedule
    options: CompileOptions
    steps: tuple[PlannedStep, ...]
    tensors: Mapping[str, Tensor]  # by value name, or `value@layout` for a relaid-out copy
    arena_nbytes: int

    def kernel_ids(self) -> dict[str, str]:
        """Kernel id by step name."""
        return {step.name: step.kernel.id for step in self.steps}


__all__ = ["Plan", "PlannedStep", "Tensor", "tensor_nbytes"]
