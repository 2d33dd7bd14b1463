"""The reference: every op in float64, with PyTorch on the CPU. It imports no backend.

The semantics are stated at the top of `r18.backend`; each op's `OpSpec` implements them. While a
kernel runs the reference raises `KernelRunning`, which catches kernels that call it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from r18.backend import Array
from r18.errors import R18Error, UsageError
from r18.graph.ops import Op, Problem
from r18_oracle.ops.spec import SumSpec, Tensors
from r18_oracle.ops.table import spec_of
from r18_oracle.threads import threads_for


class KernelRunning(R18Error):
    """The reference was called from inside a kernel."""


_running = threading.Event()


@contextmanager
def kernel_running() -> Iterator[None]:
    """While a kernel has control the reference raises `KernelRunning`."""
    _running.set()
    try:
        yield
    finally:
        _running.clear()


def no_kernel_running() -> None:
    """Raise `KernelRunning` when a kernel under test has control."""
    if _running.is_set():
        raise KernelRunning("a kernel under test called the oracle's reference")


def reference(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """The result in float64 from float64 inputs and weights (logical shapes, `op.weights()` order).

    Raises `KernelRunning` when a kernel under test has control, `UsageError` for an op without a
    spec and for arrays that are not float64.
    """
    return _run(spec_of(problem.op).reference, problem.op, inputs, weights)


def explanation(
    problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...], got: Array
) -> str:
    """A likely cause of a wrong output, in a sentence; empty if the op's spec does not know one.

    Raises `KernelRunning` when a kernel under test has control.
    """
    no_kernel_running()
    with torch.inference_mode(), _threads_for(inputs, weights):
        arrays = _tensors(inputs), _tensors(weights)
        return spec_of(problem.op).explain(problem.op, *arrays, got.astype(np.float64))


def pre_epilogue(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """The sums of products of a convolution or linear, before bias, residual and ReLU.

    Raises as `reference` does, and `UsageError` for an op without sums of products.
    """
    return _run(sum_spec(problem.op).sums, problem.op, inputs, weights)


def magnitude(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """S = Σ|w||x| of a convolution or linear: the sums of products of absolute values."""
    return pre_epilogue(
        problem, tuple(np.abs(a) for a in inputs), tuple(np.abs(a) for a in weights)
    )


def sum_spec(op: Op) -> SumSpec[Any]:
    """The spec of an op whose outputs are sums of products; raises `UsageError` for any other."""
    spec = spec_of(op)
    if not isinstance(spec, SumSpec):
        raise UsageError(f"{op.label} has no sums of products")
    return spec


def _run(
    compute: Callable[[Any, Tensors, Tensors], torch.Tensor],
    op: Op,
    inputs: tuple[Array, ...],
    weights: tuple[Array, ...],
) -> Array:
    no_kernel_running()
    for array in (*inputs, *weights):
        if array.dtype != np.float64:
            raise UsageError(f"the reference only takes float64, got {array.dtype}")
    with torch.inference_mode(), _threads_for(inputs, weights):
        y: Array = compute(op, _tensors(inputs), _tensors(weights)).numpy()
    return y


def _threads_for(*arrays: tuple[Array, ...]) -> AbstractContextManager[None]:
    return threads_for(sum(array.size for some in arrays for array in some))


def _tensors(arrays: tuple[Array, ...]) -> Tensors:
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)
