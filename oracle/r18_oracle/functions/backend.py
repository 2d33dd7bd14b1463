"""A function as a backend with one kernel: a call of it on arrays over the buffers of a launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from r18.backend import Array, Backend, Buffer, DeviceInfo, Kernel, Memory, Stream
from r18.backend.kernel import RoundingContract
from r18.graph.ops import Conv2d, Op, Problem, Shape
from r18.graph.precision import Precision
from r18_oracle.functions.arithmetic import BITS, Arithmetic
from r18_oracle.functions.arrays import Arrays
from r18_oracle.functions.likes import Like
from r18_oracle.functions.signature import Signature
from r18_oracle.functions.suites.adapted import Adapted

LEAST_BITS = 4
"""Sums so long that their bound is a large part of the result say nothing: a function that sums in
16 bits is not asked for them. K roundings of unit roundoff 2⁻ᵖ leave p − log₂K bits."""


@dataclass(frozen=True, eq=False)
class FunctionKernel(Kernel):
    """A function with an operator's signature.

    title:      the first and the third part of its id: its module and its own name.
    function:   the function itself. like: the operator that it is judged by.
    arrays:     the library and device of its arguments and results.
    arithmetic: the arithmetic that it is judged by.
    deterministic: whether it must give the same bits each time.
    refuses:    called as the function is, with shapes in place of arrays; a sentence, or True, for
                a call that the function does not take.
    windows:    the windows of a convolution that it is a kernel for: all, those that Winograd's
                bound is for, or the others.
    """

    title: tuple[str, str]
    function: Callable[..., Any]
    like: Like
    arrays: Arrays
    arithmetic: Arithmetic
    deterministic: bool = True
    refuses: Callable[..., object] | None = None
    windows: Literal["all", "winograd", "others"] = "all"

    @property
    def id(self) -> str:
        module, name = self.title
        return f"{module}/{self.op.name}/{name}/{self.precision.name}"

    @property
    def op(self) -> type[Op]:
        return self.like.op

    @property
    def algorithm(self) -> str:
        return self.title[1]

    @cached_property
    def precision(self) -> Precision:
        return self.arithmetic.precision

    @cached_property
    def contract(self) -> RoundingContract:
        return self.arithmetic.contract

    @cached_property
    def signature(self) -> Signature:
        return Signature.of(self.function)

    def refusal(self, problem: Problem) -> str | None:
        if type(problem.op) is self.op and problem.op.extras:
            return "groups and dilation are not asked for"
        wrong = super().refusal(problem) or self.like.refuses(problem)
        if wrong is not None:
            return wrong
        if (taken := self.signature.refusal(self.like.call(problem.op))) is not None:
            return taken
        if self.windows != "all" and _is_winograd(problem) != (self.windows == "winograd"):
            return "is judged by another contract"
        return self._too_long(problem) or self._refused(problem)

    def _refused(self, problem: Problem) -> str | None:
        """Why a problem is refused, by a suite's rules or by the user's own function; or None."""
        call, shapes = self.like.call(problem.op), [*problem.inputs, *self._weight_shapes(problem)]
        given = [None if index is None else shapes[index] for _, index in call.arrays]
        for refuses in (self._by_suite, self.refuses):
            if refuses is None:
                continue
            positional, named = Signature.of(refuses).bound(call, given)
            reason = refuses(*positional, **named)
            if reason is True:
                return f"is refused by {getattr(refuses, '__name__', 'refuses')}"
            if isinstance(reason, str):
                return reason
        return None

    @property
    def _by_suite(self) -> Callable[..., object] | None:
        return self.function.refuses if isinstance(self.function, Adapted) else None

    def _weight_shapes(self, problem: Problem) -> list[Shape]:
        """The shapes of the weights as the function gets them."""
        shapes = [spec.shape for spec in problem.op.weights()]
        return [shape[::-1] for shape in shapes] if self.like.transposes else shapes

    def _too_long(self, problem: Problem) -> str | None:
        """Why a problem's sums are too long: the contract promises almost no bit of them. None
        otherwise."""
        terms = getattr(problem.op, "depth", 0) or getattr(problem.op, "in_features", 0)
        if self.like.name == "adaptive_avg_pool2d":
            terms = math.prod(problem.inputs[0][2:])
        bits = BITS[self.contract.accumulate] - self.contract.truncates
        if terms and math.log2(2 * terms + 4) > bits - LEAST_BITS:
            return f"sums in {self.contract.accumulate} leave no bit of that many terms"
        return None

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        stored = map(self.precision.stored, weights, problem.op.weights())
        buffers = []
        for array in self.like.weights(tuple(stored)):
            buffers.append(self.arrays.memory.empty(array.nbytes))
            self.arrays.memory.upload(np.ascontiguousarray(array), buffers[-1])
        return tuple(buffers)

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        dtype = self.precision.output_dtype(problem.op)
        specs = problem.op.weights()
        shapes = self._weight_shapes(problem)
        dtypes = [self.precision.weight_dtype(spec) for spec in specs]
        given = [
            *((one, shape, dtype) for one, shape in zip(inputs, problem.inputs, strict=True)),
            *zip(weights, shapes, dtypes, strict=True),
        ]
        call = self.like.call(problem.op)
        arrays = [
            None if index is None else self.arrays.view(*given[index]) for _, index in call.arrays
        ]
        out = self._written(problem, output, dtype)
        positional, named = self.signature.bound(call, arrays, out)
        with self.arrays.running(stream):
            self.arrays.poison(output, math.prod(problem.output) * dtype.itemsize)
            result = self.function(*positional, **named)
            if out is None or (result is not None and result is not out):
                self.arrays.check_held()
                self.arrays.keep(result, output, self.like.result(problem), dtype)
                self.arrays.hold(result, [one for one in (*arrays, out) if one is not None])

    def _written(self, problem: Problem, output: Buffer, dtype: np.dtype[Any]) -> Any:
        """The array that a function writes, in the operator's shape; None if it returns its
        result."""
        if not self.signature.writes:
            return None
        return self.arrays.view(output, self.like.result(problem), dtype)


def _is_winograd(problem: Problem) -> bool:
    """Whether a problem is one that a Winograd contract has a bound for."""
    op = problem.op
    return isinstance(op, Conv2d) and op.kernel_size == (3, 3) and op.stride == (1, 1)


class FunctionBackend(Backend):
    """The kernel of one function.

    Two kernels of a convolution that is held to a Winograd contract: its 3×3 windows of stride 1,
    and all others, which are held to the same sums.
    """

    name = "function"  # each has its own, after its module

    def __init__(self, kernel: FunctionKernel) -> None:
        self.name = kernel.title[0]  # type: ignore[misc]
        self.kernel = kernel

    def probe(self) -> DeviceInfo:
        return self.kernel.arrays.device()

    def kernels(self) -> tuple[FunctionKernel, ...]:
        one = self.kernel
        if not one.arithmetic.algorithm.startswith("winograd"):
            return (one,)
        return self._windowed

    @cached_property
    def _windowed(self) -> tuple[FunctionKernel, ...]:
        one, (module, name) = self.kernel, self.kernel.title
        sums = replace(one.arithmetic, algorithm="sum")
        others = replace(one, title=(module, f"{name}-others"), arithmetic=sums, windows="others")
        return (replace(one, windows="winograd"), others)

    @property
    def memory(self) -> Memory:
        return self.kernel.arrays.memory

    def stream(self) -> Stream:
        return self.kernel.arrays.stream()


__all__ = ["FunctionBackend", "FunctionKernel"]
