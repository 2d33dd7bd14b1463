"""What a cheat is, and how one is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults.fault import kernel
from faults.others import add, of_inputs, relu
from r18.backend import Array, Kernel
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import Op
from r18.graph.precision import FP32

Arrays = tuple[Array, ...]
ADD = of_inputs(add)
RELU = of_inputs(relu)


@dataclass(frozen=True)
class Cheat:
    """A cheat: what it tries, and the check that is meant to catch it (two if either may)."""

    name: str
    trick: str
    checks: tuple[str, ...]
    make: Callable[[], Kernel]


def cheat(
    op: type[Op],
    name: str,
    trick: str,
    checks: str,
    run: Callable[[], HostFunction],
    made_by: Callable[..., Kernel] = kernel,
    **options: Any,
) -> Cheat:
    """A cheat whose function `run` makes, with its own memory; `options` are those of `kernel`."""
    return Cheat(
        name, trick, tuple(checks.split()), lambda: made_by("cheat", op, name, run(), **options)
    )


def always(run: HostFunction) -> Callable[[], HostFunction]:
    """A function without a memory."""
    return lambda: run


def after(deed: Callable[[], object], right: HostFunction = RELU) -> Callable[[], HostFunction]:
    """A function that computes correctly, and then calls `deed`."""

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        right(op, inputs, weights, out, workspace)
        deed()

    return lambda: run


def of_class(kind: type[HostKernel]) -> Callable[..., Kernel]:
    """A maker of kernels of the given class."""

    def made(backend: str, op: type[Op], name: str, run: HostFunction, **options: Any) -> Kernel:
        contract = kernel(backend, op, name, run).contract
        return kind(backend, op, name, FP32, contract, run, **options)

    return made
