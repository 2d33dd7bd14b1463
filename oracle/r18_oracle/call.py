"""Calling a kernel under guard: poisoned buffers, guard zones, and nothing taken on trust.

The launch itself is the core's `Launch.enqueue`, which a compiled program uses too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r18.backend import Array, Backend, Buffer, Kernel, Memory, input_layout, output_layout
from r18.executor import Launch, download, prepare_weights, upload
from r18.ops import Problem
from r18.planner import aligned
from r18_oracle.cases import Case
from r18_oracle.reference import kernel_running

GUARD_BYTE = 0xA5
GUARD_NBYTES = 4096
"""On either side of each buffer: a row of a small image written one row off still lands here."""
POISONS = (0xFF, 0x3C)
"""Bytes that outputs and workspaces hold before a call. 0xFF.. is a NaN in every float format, and
0x3C.. an ordinary number: an element that shows both in two calls was written in neither."""
SETTLE_SECONDS = 0.002
"""How long to wait before looking again whether a kernel that said it was done still writes."""


@dataclass
class Guarded:
    """A buffer of `nbytes` between two guard zones, in one allocation."""

    memory: Memory
    nbytes: int
    whole: Buffer = field(init=False)
    inner: Buffer = field(init=False)
    lead: int = field(init=False)

    def __post_init__(self) -> None:
        self.lead = aligned(GUARD_NBYTES, self.memory.alignment)
        self.whole = self.memory.empty(self.lead + self.nbytes + GUARD_NBYTES)
        self.memory.fill(self.whole, GUARD_BYTE)
        self.inner = self.whole.view(self.lead, self.nbytes)

    def read(self) -> Array:
        """Every byte of the allocation."""
        nbytes = self.lead + self.nbytes + GUARD_NBYTES
        return self.memory.download(self.whole, (nbytes,), np.dtype(np.uint8))

    def broken(self, seen: Array) -> int | None:
        """The offset, relative to the buffer, of the first overwritten guard byte; or None."""
        guards = np.concatenate([seen[: self.lead], seen[self.lead + self.nbytes :]])
        wrong = np.flatnonzero(guards != GUARD_BYTE)
        if not wrong.size:
            return None
        at = int(wrong[0])
        return at - self.lead if at < self.lead else at - self.lead + self.nbytes


@dataclass(frozen=True)
class Observation:
    """What one call left behind.

    output:   logical array in storage dtype. raw: its bytes as they lie in memory.
    trespass: a sentence about the first byte written outside a buffer, or None.
    changed:  a sentence about the first input or weight that was written to, or None.
    late:     whether the output or a guard still changed after `synchronize` had returned.
    """

    output: Array
    raw: Array
    trespass: str | None
    changed: str | None
    late: bool


def observe(
    backend: Backend,
    kernel: Kernel,
    case: Case,
    *,
    poison: int = POISONS[0],
    alias: bool = False,
    settle: bool = False,
    stream: Any = None,
) -> Observation:
    """Run the kernel once on the case, in a stream of its own unless one is given.

    alias:  give it its first input's buffer as output, as the executor may for `in_place`.
    settle: look at the output again a moment after `synchronize`.
    """
    memory, problem = backend.memory, case.problem
    stream = stream or backend.stream()
    dtype = case.precision.dtype
    inputs: list[Guarded] = []
    for array in case.inputs:
        inputs.append(Guarded(memory, array.nbytes))
        upload(memory, array, input_layout(kernel, problem), dtype, inputs[-1].inner)
    names = [spec.role for spec in problem.op.weights()]
    with kernel_running():
        weights = prepare_weights(kernel, problem, names, case.wide()[1])
        scratch_nbytes = kernel.workspace(problem)
    output = inputs[0] if alias else Guarded(memory, _output_nbytes(problem, case))
    workspace = Guarded(memory, scratch_nbytes)
    memory.fill(workspace.inner, poison)
    if not alias:
        memory.fill(output.inner, poison)
    before = [b.read() for b in inputs]
    weights_before = [_bytes(memory, buffer) for buffer in weights]
    launch = Launch(
        kernel, problem, tuple(b.inner for b in inputs), weights, output.inner, workspace.inner
    )
    with kernel_running():
        launch.enqueue(stream)
        stream.synchronize()
    seen = output.read()
    late = False
    if settle:
        time.sleep(SETTLE_SECONDS)
        late = not np.array_equal(seen, output.read())
    array = download(memory, output.inner, problem.output, output_layout(kernel, problem), dtype)
    buffers = {f"input {i}": b for i, b in enumerate(inputs)} | {"workspace": workspace}
    if not alias:
        buffers["output"] = output
    trespass = None
    for name, buffer in buffers.items():
        at = buffer.broken(buffer.read())
        if at is not None:
            side = f"{-at} byte(s) before" if at < 0 else f"{at - buffer.nbytes} byte(s) past"
            trespass = f"wrote {side} the {'beginning' if at < 0 else 'end'} of the {name} buffer"
            break
    return Observation(
        output=array,
        raw=seen[output.lead : output.lead + output.nbytes],
        trespass=trespass,
        changed=_changed(inputs[1:] if alias else inputs, before[1:] if alias else before)
        or _changed_weights(memory, names, weights, weights_before),
        late=late,
    )


def _output_nbytes(problem: Problem, case: Case) -> int:
    return int(np.prod(problem.output, dtype=object)) * case.precision.dtype.itemsize


def _bytes(memory: Memory, buffer: Buffer) -> Array:
    return memory.download(buffer, (buffer.nbytes,), np.dtype(np.uint8))


def _changed(buffers: list[Guarded], before: list[Array]) -> str | None:
    for index, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
        new = buffer.read()[buffer.lead : buffer.lead + buffer.nbytes]
        wrong = np.flatnonzero(new != old[buffer.lead : buffer.lead + buffer.nbytes])
        if wrong.size:
            return f"input {index} was written to, first at byte {int(wrong[0])}"
    return None


def _changed_weights(
    memory: Memory, names: list[str], weights: tuple[Buffer, ...], before: list[Array]
) -> str | None:
    for index, (buffer, old) in enumerate(zip(weights, before, strict=True)):
        if not np.array_equal(_bytes(memory, buffer), old):
            name = names[index] if index < len(names) else f"prepared buffer {index}"
            return f"weight '{name}' was written to"
    return None
