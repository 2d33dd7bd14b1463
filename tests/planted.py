"""Backends with one planted fault each, as `planted:FAULT.op_name`; the rest of each is right.

The faults come from `faults`, under the names of their kernels.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from faults import FAULTS
from faulty_backends import CONTRACTS, Right, kernel
from r18.backend import Kernel

BY_NAME: dict[str, Kernel] = {
    f"{fault.kernel.op.name}_{fault.kernel.algorithm}": fault.kernel
    for fault in FAULTS
    if fault.kernel.precision.name == "fp32"
}


class Planted(Right):
    """A backend that is right except for the kernel of one op."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.planted = BY_NAME[name]

    def kernels(self) -> tuple[Kernel, ...]:
        right = (kernel(op) for op in CONTRACTS if op is not self.planted.op)
        return (self.planted, *right)


FAULT = SimpleNamespace(**{name: partial(Planted, name) for name in BY_NAME})
