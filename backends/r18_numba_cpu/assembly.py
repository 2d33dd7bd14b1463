"""The machine code of kernels that multiply, and the instruction that each multiplies with."""

from __future__ import annotations

import math

import numpy as np

from r18.backend import Buffer, HostCode, HostMemory, HostStream, Kernel
from r18.graph.ops import Conv2d, ConvMaxPool, Linear, Problem
from r18.graph.precision import dtype_of
from r18.graph.quantized import QuantizedConv2d, QuantizedConvMaxPool, QuantizedLinear
from r18_numba_cpu import bfloat16, integers
from r18_numba_cpu.compiled import module, recorded
from r18_numba_cpu.microbenchmarks import (
    OF_BF16_TILES,
    OF_BYTE_TILES,
    OF_BYTES,
    OF_PAIRS,
    multiply_add,
    of_words,
)

MULTIPLYING = (
    *(Conv2d, ConvMaxPool, Linear),
    *(QuantizedConv2d, QuantizedConvMaxPool, QuantizedLinear),
)


def host_code(kernel: Kernel, problem: Problem) -> HostCode | None:
    """All functions that the kernel calls for the problem; None for one that does not multiply."""
    if not isinstance(problem.op, MULTIPLYING):
        return None
    with recorded() as calls:
        _call(kernel, problem)
    functions = {function.py_func: (function, given) for function, given in calls}
    texts = [module("jit").assembly(*call) for call in functions.values()]
    return HostCode(instruction_of(kernel, problem), "\n".join(texts))


def instruction_of(kernel: Kernel, problem: Problem) -> str:
    """The instruction that computes the products of a convolution or a linear op."""
    name = f"{kernel.algorithm}/{kernel.precision.name}"
    if name.endswith(bfloat16.BY_AMX):
        return OF_BF16_TILES
    if name.endswith(bfloat16.BY_PAIRS):
        return OF_PAIRS
    if name.endswith(integers.BY_AMX):
        op = problem.op
        multiplied = op.conv if isinstance(op, QuantizedConvMaxPool) else op
        return "tdpbssd" if multiplied.input_storage[0] == "int8" else OF_BYTE_TILES
    if name.endswith(integers.BY_WORDS):
        return of_words()
    return OF_BYTES if name.endswith(integers.BY_VNNI) else multiply_add()


def _call(kernel: Kernel, problem: Problem) -> None:
    """Enqueue the kernel on memory that holds nothing."""
    memory, op = HostMemory(), problem.op
    weights = tuple(
        np.ones(spec.shape, dtype_of(spec.storage) if spec.storage else np.float32)
        for spec in op.weights()
    )

    def buffer(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Buffer:
        return memory.empty(math.prod(shape) * dtype.itemsize)

    dtypes = kernel.precision.input_dtypes(op)
    inputs = tuple(map(buffer, problem.inputs, dtypes))
    output = buffer(problem.output, kernel.precision.output_dtype(op))
    workspace = memory.empty(kernel.workspace(problem))
    prepared = kernel.prepare(problem, weights)
    kernel.enqueue(problem, inputs, prepared, output, workspace, HostStream())


__all__ = ["host_code", "instruction_of"]
