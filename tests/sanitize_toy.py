"""A backend with a kernel that raises, as one does whose device is left in error."""

from __future__ import annotations

from typing import Any

from mutation_toy import Backend as Right
from r18.backend import Array, RoundingContract
from r18.host import HostKernel
from r18.ops import ReLU
from r18.precision import FP32


def raises(op: ReLU, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
    raise RuntimeError("an illegal address")


class Backend(Right):
    """ReLU, wrong and right."""

    def kernels(self) -> tuple[HostKernel, ...]:
        contract = RoundingContract("exact", "float32", "float32")
        return (HostKernel("toy", ReLU, "raises", FP32, contract, run=raises), *super().kernels())
