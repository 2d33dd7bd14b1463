"""The NumPy backend with kernels or programs that are wrong in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from r18.backend import Array, CompileOptions, DeviceInfo, Kernel, Program
from r18.backend import Backend as BackendBase
from r18.backend.host import HostKernel, HostStream
from r18.backend.registry import get_backend
from r18.graph.schedule import Schedule
from r18.runtime.plan import make_plan


class Altered(BackendBase):
    """The NumPy backend with more kernels, and programs of another class."""

    name = "numpy"

    def __init__(self, *more: Kernel, program: Callable[..., Any] = Program) -> None:
        self.base = get_backend("numpy")
        self.memory: Any = self.base.memory
        self.more, self.program = more, program

    def probe(self) -> DeviceInfo:
        return self.base.probe()

    def kernels(self) -> tuple[Kernel, ...]:
        return (*self.base.kernels(), *self.more)

    def stream(self) -> HostStream:
        return HostStream()

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> Any:
        return self.program(self, make_plan(self, schedule, options), weights)


def kernel(kernel_id: str) -> HostKernel:
    (found,) = (k for k in get_backend("numpy").kernels() if k.id == kernel_id)
    assert isinstance(found, HostKernel)
    return found


def spoiled(kernel_id: str, spoil: Callable[..., None], name: str = "spoiled") -> HostKernel:
    """The kernel, and then `spoil(op, inputs, weights, out)`."""
    right = kernel(kernel_id)

    def run(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
        right.run(op, inputs, weights, out, workspace)
        spoil(op, inputs, weights, out)

    return replace(right, algorithm=name, run=run)
