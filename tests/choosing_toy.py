"""A backend whose one kernel, a ReLU, chooses between two functions: for few elements, and for more
than any profile has. What the second does is right, wrong or deadly."""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mutation_toy import Backend as Plain
from mutation_toy import relu
from r18.backend import Array, Kernel, RoundingContract
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import Problem, ReLU
from r18.graph.precision import FP32

MANY = 10**9
"""Elements from which on the second function is chosen."""
EDGES = {"few": (4,), "many": (4, 50)}


@dataclass(frozen=True, eq=False)
class Named(HostKernel):
    """A kernel whose id may have another part."""

    part: str = ""

    @property
    def id(self) -> str:
        return f"{super().id}/{self.part}" if self.part else super().id

    @property
    def variant_of(self) -> str | None:
        return super().id if self.part else None


def kernel(run: HostFunction, part: str = "") -> Named:
    contract = RoundingContract("exact", "float32", "float32")
    edges = EDGES.get(part, ())
    return Named("toy", ReLU, "choosing", FP32, contract, run=run, edges=edges, part=part)


class Backend(Plain):
    """A backend whose ReLU is right, whichever function is chosen."""

    second: HostFunction = staticmethod(relu)

    def __init__(self) -> None:
        super().__init__()

        def chosen(op: Any, inputs: Any, weights: Any, out: Array, workspace: Any) -> None:
            function = relu if out.size < MANY else self.second
            function(op, inputs, weights, out, workspace)

        self._kernels = (kernel(chosen),)
        self._choices = (kernel(relu, "few"), kernel(self.second, "many"))

    def kernels(self) -> tuple[HostKernel, ...]:
        return self._kernels

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        return self._choices

    def variant(self, kernel: Kernel, problem: Problem) -> Kernel | None:
        few, many = self._choices
        return few if math.prod(problem.output) < MANY else many


def wrong(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Any) -> None:
    """A ReLU that is wrong beyond 40 elements."""
    np.maximum(inputs[0], out.size > 40, out=out)


def deadly(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, workspace: Any) -> None:
    if out.size > 40:
        ctypes.string_at(0)
    np.maximum(inputs[0], 0, out=out)


class Wrong(Backend):
    second = staticmethod(wrong)


class Deadly(Backend):
    second = staticmethod(deadly)


class Idle(Backend):
    """A backend whose second choice takes no problem."""

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        few, many = self._choices
        return few, replace(many, refuses=lambda problem: "not today")


class Picky(Backend):
    """A backend whose second choice takes only even rows."""

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        few, many = self._choices
        return few, replace(many, refuses=lambda p: "not odd" if p.inputs[0][-1] % 2 else None)


class Refusing(Backend):
    """A backend whose kernel takes no problem itself."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return (replace(self._kernels[0], refuses=lambda problem: "not me"),)


class RefusingAll(Refusing, Idle):
    """A backend whose kernel takes no problem itself, and one of whose choices takes none."""


class Exiting(Backend):
    """A backend that exits when its choices are listed."""

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        os._exit(3)


class Losing(Backend):
    """A backend whose second choice loses the device: from then on every call raises."""

    def __init__(self) -> None:
        super().__init__()
        lost: list[int] = []

        def once(op: Any, inputs: Any, weights: Any, out: Array, workspace: Any) -> None:
            if out.size > 40:
                lost.append(out.size)
            if lost:
                raise RuntimeError("an illegal memory access was encountered")
            relu(op, inputs, weights, out, workspace)

        few, _ = self._choices
        self._choices = few, kernel(once, "many")
