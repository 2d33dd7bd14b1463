"""Shrinking a problem that fails: smaller ones, the boldest first, until none fails.

For what Hypothesis has not drawn, and so cannot shrink: corners, crossings, problems of the
network, and those that took a worker process down. And for what it has, which is smallest by its
own order alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from r18.errors import ShapeError
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
)

Numbers = dict[str, int]
"""What a problem is made of, by name; all that matters to shrinking."""

FLAGS = ("bias", "residual", "relu")
FROM_ZERO = ("padding_h", "padding_w", "pool_padding_h", "pool_padding_w", *FLAGS)
"""What may be 0; all else is at least 1."""


def shrunk(
    problem: Problem, fails: Callable[[Problem], bool], enough: Callable[[], bool]
) -> Problem:
    """The smallest problem that is found to fail, starting from one that does.

    fails:  whether another problem fails in the same way. enough: asked before each is tried.
    """
    tried = {problem}
    while True:
        for candidate in reductions(problem):
            if candidate in tried:
                continue
            if enough():
                return problem
            tried.add(candidate)
            if fails(candidate):
                problem = candidate
                break
        else:
            return problem


def reductions(problem: Problem) -> Iterator[Problem]:
    """Smaller problems of the same op: all numbers at their least, all halved, then one by one.

    Some may hold no fewer elements (an output grows as a stride shrinks), but each is simpler;
    the problem itself may be among them.
    """
    for fewer in _fewer(_numbers(problem)):
        try:
            yield _problem(problem.op, fewer)
        except ShapeError:  # a window larger than its image, and the like
            continue


def elements(problem: Problem) -> int:
    """How many numbers a problem holds: inputs, weights and output."""
    weights = [spec.shape for spec in problem.op.weights()]
    return sum(math.prod(shape) for shape in (*problem.inputs, *weights, problem.output))


def _fewer(numbers: Numbers) -> Iterator[Numbers]:
    least = {name: int(name not in FROM_ZERO) for name in numbers}
    yield least
    yield {name: max(least[name], n // 2) for name, n in numbers.items()}
    for step in (lambda n: 0, lambda n: n // 2, lambda n: n - 1):
        for name, n in numbers.items():
            if n > least[name]:
                yield numbers | {name: max(least[name], step(n))}


def _numbers(problem: Problem) -> Numbers:
    op, shape = problem.op, problem.inputs[0]
    found = dict(zip("nchw", shape, strict=False))
    if isinstance(op, Linear):
        return {"n": shape[0], "k": shape[1], "o": op.out_features}
    if isinstance(op, ConvMaxPool):
        found |= {f"pool_{name}": n for name, n in _window(op.pool).items()}
        op = op.conv
    if isinstance(op, Conv2d | MaxPool2d):
        found |= _window(op)
    if isinstance(op, Conv2d):
        found["o"] = op.out_channels
    return found | {name: int(getattr(op, name)) for name in FLAGS if hasattr(op, name)}


def _window(op: Conv2d | MaxPool2d) -> Numbers:
    return {
        f"{name}_{axis}": extent
        for name in ("kernel_size", "stride", "padding")
        for axis, extent in zip("hw", getattr(op, name), strict=True)
    }


def _problem(op: Op, numbers: Numbers) -> Problem:
    """The problem of such numbers, like one of that op in all else. Raises `ShapeError`."""
    shape = tuple(numbers[axis] for axis in "nchw" if axis in numbers)

    def pair(name: str) -> tuple[int, int]:
        return numbers[f"{name}_h"], numbers[f"{name}_w"]

    match op:
        case Linear():
            return Problem(Linear(numbers["k"], numbers["o"]), ((numbers["n"], numbers["k"]),))
        case BatchNorm():
            return Problem(replace(op, channels=numbers["c"]), (shape,))
        case Normalize():
            op = Normalize(op.mean[: numbers["c"]], op.std[: numbers["c"]])
        case MaxPool2d():
            op = MaxPool2d(pair("kernel_size"), pair("stride"), pair("padding"))
        case Conv2d():
            windows = pair("kernel_size"), pair("stride"), pair("padding")
            plain = Conv2d(numbers["c"], numbers["o"], *windows)
            flags = (bool(numbers[name]) for name in FLAGS)
            op = Conv2d(numbers["c"], numbers["o"], *windows, *flags)
            if op.residual:
                return Problem(op, (shape, plain.infer(shape)))
        case ConvMaxPool():
            windows = pair("pool_kernel_size"), pair("pool_stride"), pair("pool_padding")
            conv = _problem(op.conv, numbers).op
            assert isinstance(conv, Conv2d)
            op = ConvMaxPool(conv, MaxPool2d(*windows))
        case Add():
            op = Add(relu=bool(numbers["relu"]))
    return Problem(op, (shape,) * op.arity)
