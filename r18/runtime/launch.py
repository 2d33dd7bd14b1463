"""Calling one kernel on host arrays, by the same `Launch.enqueue` as in a program."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.backend import (
    Array,
    Backend,
    Kernel,
    Launch,
    download,
    input_layout,
    output_layout,
    prepare_weights,
    tensor_nbytes,
    upload,
)
from r18.backend.launch import refusal_of, workspace_of
from r18.errors import NoKernel, ShapeError, UsageError
from r18.graph.ops import Problem
from r18.graph.precision import is_floating


def launch_on(backend: Backend, kernel: Kernel, problem: Problem, *arrays: Array) -> Launch:
    """A launch in new buffers, of host arrays: the problem's inputs, then the op's weights.

    Arrays are logical (NCHW, OIHW) and converted to the kernel's layout and format: floating-point
    ones are rounded, pixels are uint8. Raises `NoKernel` with the refusal, `ShapeError` or
    `WeightsError` for arrays that are not the problem's, `UsageError` for inputs of another kind,
    which would be cast: complex numbers, integers, masks, strings.
    """
    if (reason := refusal_of(kernel, problem)) is not None:
        raise NoKernel(f"{kernel.id} refuses {problem}: {reason}")
    weights = arrays[problem.op.arity :]
    given = kernel.precision.input_dtypes(problem.op)
    inputs = [
        _as_input(array, problem, dtype)
        for array, dtype in zip(arrays[: problem.op.arity], given, strict=False)
    ]
    if tuple(a.shape for a in inputs) != problem.inputs:
        raise ShapeError(
            f"{problem} was given inputs of shape {', '.join(str(a.shape) for a in inputs)}"
        )
    memory, dtype = backend.memory, kernel.precision.output_dtype(problem.op)
    buffers = []
    for array, stored in zip(inputs, given, strict=True):
        buffers.append(memory.empty(tensor_nbytes(array.shape, stored)))
        upload(memory, array, input_layout(kernel, problem), stored, buffers[-1])
    names = [spec.role for spec in problem.op.weights()]
    return Launch(
        kernel,
        problem,
        tuple(buffers),
        prepare_weights(kernel, problem, names, weights),
        memory.empty(tensor_nbytes(problem.output, dtype)),
        memory.empty(workspace_of(kernel, problem)),
    )


def _as_input(array: Array, problem: Problem, dtype: np.dtype[Any]) -> Array:
    """The input, if its dtype is the problem's or may be rounded to it."""
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{problem.op.label} knows no mask: fill the masked array first")
    if not isinstance(array, np.ndarray | np.generic):
        raise UsageError(f"{problem.op.label} reads NumPy arrays, got a {type(array).__name__}")
    integers = dtype.kind in "iu"
    if array.dtype != dtype and (integers or not is_floating(array.dtype)):
        wanted = f"{dtype} {'pixels' if problem.op.of_pixels else 'values'}"
        wanted = wanted if integers else f"floating-point values or {dtype}"
        raise UsageError(f"{problem.op.label} reads {wanted}, got {array.dtype}: nothing is cast")
    return np.asarray(array)


def run_kernel(backend: Backend, kernel: Kernel, problem: Problem, *arrays: Array) -> Array:
    """Call one kernel on host arrays, as `launch_on` takes them.

    The result is logical, in the kernel's storage format.
    """
    launch = launch_on(backend, kernel, problem, *arrays)
    stream = backend.stream()
    launch.enqueue(stream)
    stream.synchronize()
    layout = output_layout(kernel, problem)
    dtype = kernel.precision.output_dtype(problem.op)
    return download(backend.memory, launch.output, problem.output, layout, dtype)


__all__ = ["launch_on", "run_kernel"]
