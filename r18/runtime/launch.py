"""Calling one kernel on host arrays, by the same `Launch.enqueue` as in a program."""

from __future__ import annotations

from r18.backend import (
    Array,
    Backend,
    Kernel,
    Launch,
    download,
    input_dtype,
    input_layout,
    output_layout,
    prepare_weights,
    tensor_nbytes,
    upload,
)
from r18.errors import NoKernel, ShapeError
from r18.graph.ops import Problem


def launch_on(backend: Backend, kernel: Kernel, problem: Problem, *arrays: Array) -> Launch:
    """A launch in new buffers, of host arrays: the problem's inputs, then the op's weights.

    Arrays are logical (NCHW, OIHW) and converted to the kernel's layout and format. Raises
    `NoKernel` with the refusal, `ShapeError` or `WeightsError` for arrays that are not the
    problem's.
    """
    if (reason := kernel.refusal(problem)) is not None:
        raise NoKernel(f"{kernel.id} refuses {problem}: {reason}")
    inputs, weights = arrays[: problem.op.arity], arrays[problem.op.arity :]
    if tuple(a.shape for a in inputs) != problem.inputs:
        raise ShapeError(
            f"{problem} was given inputs of shape {', '.join(str(a.shape) for a in inputs)}"
        )
    memory, dtype = backend.memory, kernel.precision.dtype
    buffers, given = [], input_dtype(problem, kernel.precision)
    for array in inputs:
        buffers.append(memory.empty(tensor_nbytes(array.shape, given)))
        upload(memory, array, input_layout(kernel, problem), given, buffers[-1])
    names = [spec.role for spec in problem.op.weights()]
    return Launch(
        kernel,
        problem,
        tuple(buffers),
        prepare_weights(kernel, problem, names, weights),
        memory.empty(tensor_nbytes(problem.output, dtype)),
        memory.empty(kernel.workspace(problem)),
    )


def run_kernel(backend: Backend, kernel: Kernel, problem: Problem, *arrays: Array) -> Array:
    """Call one kernel on host arrays, as `launch_on` takes them.

    The result is logical, in the kernel's storage format.
    """
    launch = launch_on(backend, kernel, problem, *arrays)
    stream = backend.stream()
    launch.enqueue(stream)
    stream.synchronize()
    layout, dtype = output_layout(kernel, problem), kernel.precision.dtype
    return download(backend.memory, launch.output, problem.output, layout, dtype)


__all__ = ["launch_on", "run_kernel"]
