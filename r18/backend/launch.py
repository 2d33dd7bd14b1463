"""Launches: the one way in which kernels are called, alone or in a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r18.backend.device import Array, Buffer, Memory, Stream
from r18.backend.kernel import Kernel
from r18.backend.plan import Plan
from r18.errors import WeightsError, note_kernel, noting
from r18.graph.ops import Layout, Problem, Shape
from r18.graph.passes import as_array, fold_weights
from r18.graph.precision import as_stored


def refusal_of(kernel: Kernel, problem: Problem) -> str | None:
    """`Kernel.refusal`. An exception of its code gets a `KernelNote`."""
    with noting(kernel.id, problem):
        return kernel.refusal(problem)


def workspace_of(kernel: Kernel, problem: Problem) -> int:
    """`Kernel.workspace` in bytes. An exception of its code gets a `KernelNote`."""
    with noting(kernel.id, problem):
        return kernel.workspace(problem)


@dataclass(frozen=True)
class Launch:
    """A kernel with its problem and buffers.

    beside: it may run at the same time as the launch before it.
    """

    kernel: Kernel
    problem: Problem
    inputs: tuple[Buffer, ...]
    weights: tuple[Buffer, ...]
    output: Buffer
    workspace: Buffer
    beside: bool = False

    def enqueue(self, stream: Stream) -> None:
        """Run the kernel. An exception of its code gets a `KernelNote`."""
        try:
            self.kernel.enqueue(
                self.problem, self.inputs, self.weights, self.output, self.workspace, stream
            )
        except Exception as error:  # `noting` costs a microsecond, in every launch
            note_kernel(error, self.kernel.id, self.problem)
            raise


def upload(
    memory: Memory, array: Array, kernel_layout: Layout, dtype: np.dtype[Any], buffer: Buffer
) -> None:
    """Round a logical array to a storage dtype and bring it into a buffer in a layout."""
    if array.ndim == 4 and kernel_layout is Layout.NHWC:
        array = array.transpose(0, 2, 3, 1)
    memory.upload(as_stored(array, dtype), buffer)


def download(
    memory: Memory, buffer: Buffer, shape: Shape, layout: Layout, dtype: np.dtype[Any]
) -> Array:
    """A buffer's tensor as a logical array in its storage dtype."""
    array = memory.download(buffer, layout.physical(shape), dtype)
    return np.asarray(logical(array, layout), order="C")


def logical(array: Array, layout: Layout) -> Array:
    """A view of the logical shape of an array that has a layout's physical shape."""
    return array.transpose(0, 3, 1, 2) if array.ndim == 4 and layout is Layout.NHWC else array


def widened(array: Array) -> Array:
    """A copy in float32, or in float64 of a float64 array: the format that programs return."""
    return array.astype(np.float64 if array.dtype == np.float64 else np.float32)


def prepare_weights(
    kernel: Kernel, problem: Problem, names: Sequence[str], weights: Sequence[Array]
) -> tuple[Buffer, ...]:
    """Check dtypes and shapes, then let the kernel bring its weights into device form."""
    specs = problem.op.weights()
    if len(specs) != len(weights):
        raise WeightsError(f"{problem.op.label} reads {len(specs)} weights, got {len(weights)}")
    arrays = [
        as_array(weight, f"weight '{name}'", spec.storage)
        for name, weight, spec in zip(names, weights, specs, strict=True)
    ]
    for name, spec, array in zip(names, specs, arrays, strict=True):
        if array.shape != spec.shape:
            raise WeightsError(
                f"weight '{name}' has shape {array.shape}, {problem.op.label} needs {spec.shape}"
            )
    with noting(kernel.id, problem):
        return kernel.prepare(problem, tuple(arrays))


def prepare_plan(plan: Plan, weights: Mapping[str, Array]) -> tuple[tuple[Buffer, ...], ...]:
    """Each step's weights in device form, from those of level `none`; see `prepare_weights`."""
    read = fold_weights(plan.schedule, weights)
    return tuple(
        prepare_weights(step.kernel, step.problem, step.weights, [read[n] for n in step.weights])
        for step in plan.steps
    )


def bind(
    plan: Plan,
    prepared: Sequence[tuple[Buffer, ...]],
    arena: Buffer,
    given: Mapping[str, Buffer] | None = None,
) -> tuple[Launch, ...]:
    """The plan's steps over an arena, ready to enqueue.

    prepared: each step's weights. given: buffers to use instead of the tensors of those keys.
    """
    given = given or {}

    def place(key: str) -> Buffer:
        tensor = plan.tensors[key]
        return given[key] if key in given else arena.view(tensor.offset, tensor.nbytes)

    return tuple(
        Launch(
            step.kernel,
            step.problem,
            tuple(place(key) for key in step.inputs),
            weights,
            place(step.output),
            arena.view(step.workspace_offset, step.workspace_nbytes),
            step.beside,
        )
        for step, weights in zip(plan.steps, prepared, strict=True)
    )


def enqueue_all(launches: Sequence[Launch], stream: Stream) -> None:
    """Enqueue launches in order; two that may run at the same time go into two branches."""
    pending = list(reversed(launches))
    while pending:
        launch = pending.pop()
        if pending and pending[-1].beside:
            with stream.branch() as branch:
                launch.enqueue(stream)
                pending.pop().enqueue(branch)
        else:
            launch.enqueue(stream)


__all__ = [
    "Launch",
    "bind",
    "download",
    "enqueue_all",
    "logical",
    "prepare_plan",
    "prepare_weights",
    "upload",
    "widened",
]
