"""Planted faults, and the backend that they belong to."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r18.backend import Backend as BackendBase
from r18.backend import Buffer, DeviceInfo, Kernel, RoundingContract, Stream
from r18.backend.host import HostFunction, HostKernel, HostMemory, HostStream, host
from r18.graph.ops import Op, Problem
from r18.graph.precision import FP32, Precision
from r18_oracle.ops.table import spec_of


@dataclass(frozen=True, eq=False)
class Fault:
    """A kernel that is wrong on purpose.

    wrong:  what is wrong with it, in words.
    checks: the check that must catch it; two where the numbers decide which comes first (a wrong
            divisor is wrong on all inputs, but integers can only be used where the right divisor is
            a power of two).
    """

    kernel: Kernel
    wrong: str
    checks: tuple[str, ...]


class LateStream(HostStream):
    """The stream of a device whose launches overlap: copies are late until `synchronize`."""

    overlapping = True

    def __init__(self) -> None:
        self._late: list[tuple[Buffer, Buffer]] = []

    def copy_late(self, source: Buffer, target: Buffer) -> None:
        """Copy when the stream is synchronised."""
        self._late.append((source, target))

    def synchronize(self) -> None:
        for source, target in self._late:
            host(target).array[...] = host(source).array
        self._late.clear()


@dataclass(frozen=True, eq=False)
class PlantedKernel(HostKernel):
    """A host kernel that waits for what a `LateStream` holds back, unless it is `hasty`."""

    hasty: bool = False

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        if not self.hasty:
            stream.synchronize()
        super().enqueue(problem, inputs, weights, output, workspace, stream)


def kernel(
    backend: str,
    op: type[Op],
    name: str,
    run: HostFunction,
    precision: Precision = FP32,
    contract: RoundingContract | None = None,
    **options: Any,
) -> HostKernel:
    """A host kernel `backend/op/name/precision`, with the op's plainest contract by default."""
    plain = RoundingContract(spec_of(op).algorithms[0], precision.accumulate, precision.storage)
    return PlantedKernel(backend, op, name, precision, contract or plain, run, **options)


def fault(
    op: type[Op], name: str, wrong: str, checks: str, run: HostFunction, **options: Any
) -> Fault:
    """A fault; `checks` are separated by blanks, `options` are those of `kernel`."""
    return Fault(kernel("fault", op, name, run, **options), wrong, tuple(checks.split()))


class HostBackend(BackendBase):
    """Some kernels as a backend that runs on the host."""

    name = "fault"

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.memory = HostMemory()
        self._kernels = tuple(kernels)

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", f"CPU ({platform.machine()})")

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels

    def stream(self) -> HostStream:
        return HostStream()
