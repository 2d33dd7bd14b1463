"""Strategies: problems that chase a kernel's edges, and those of the real network.

Draws shrink to the smallest failing problem: every size is drawn so that smaller comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hypothesis import assume
from hypothesis import strategies as st

from r18.backend import FUSION_LEVELS, Kernel
from r18.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18.passes import fuse
from r18.schedule import Schedule

ODD = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 31, 33)
"""Sizes that any kernel is tried at: small, odd, prime, and around powers of two."""


def schedule_problems(schedule: Schedule, batches: Sequence[int]) -> tuple[Problem, ...]:
    """Every distinct problem of a network at every fusion level, softmax and relayouts included."""
    found: dict[Problem, None] = {}
    for batch in batches:
        for level in FUSION_LEVELS:
            for problem in fuse(schedule, level).problems(batch).values():
                found.setdefault(problem)
        shapes = schedule.shapes(batch)
        found.setdefault(Problem(Softmax(), (shapes[schedule.output],)))
        for shape in {shape for shape in shapes.values() if len(shape) == 4}:
            found.setdefault(Problem(Relayout(Layout.NCHW, Layout.NHWC), (shape,)))
            found.setdefault(Problem(Relayout(Layout.NHWC, Layout.NCHW), (shape,)))
    return tuple(found)


def problems(kernel: Kernel, max_elements: int, max_macs: int) -> st.SearchStrategy[Problem]:
    """Problems of the kernel's op, at most so large, that the kernel may still refuse."""
    near = {e + d for e in kernel.edges for d in (-1, 0, 1)}
    sizes = sorted({s for s in (*near, *ODD) if s >= 1})
    draw = _BY_OP[kernel.op]
    return draw(sizes, max_elements, max_macs)


def _size(sizes: Sequence[int], most: int) -> st.SearchStrategy[int]:
    fitting = [s for s in sizes if s <= max(1, most)] or [1]
    return st.sampled_from(fitting)


@st.composite
def _images(draw: st.DrawFn, sizes: Sequence[int], most: int) -> tuple[int, int, int, int]:
    """(N, C, H, W) of at most `most` elements."""
    n = draw(st.sampled_from([1, 2, 3, 5, 8]))
    c = draw(_size(sizes, most // n))
    h = draw(_size(sizes, most // (n * c)))
    w = draw(_size(sizes, most // (n * c * h)))
    return (n, c, h, w)


@st.composite
def _conv(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    """All strides, paddings and kernel sizes; half of the draws look like ResNet's."""
    if draw(st.booleans()):
        k, s, p = draw(
            st.sampled_from([(3, 1, 1), (1, 1, 0), (3, 2, 1), (1, 2, 0), (7, 2, 3), (3, 1, 0)])
        )
        kernel, stride, padding = (k, k), (s, s), (p, p)
    else:
        kernel = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
        stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
    area = kernel[0] * kernel[1]
    n = draw(st.sampled_from([1, 2, 3, 5, 8]))
    c = draw(_size(sizes, min(most, macs // area) // n))
    o = draw(_size(sizes, min(most, macs // (area * c)) // n))
    rest = max(1, macs // (n * c * o * area))
    extents: list[int] = []
    for axis in (0, 1):
        least = max(1, kernel[axis] - 2 * padding[axis])
        limit = most // (n * max(c, o) * math.prod(extents))
        out = draw(_size(sizes, min(limit, rest) if axis == 0 else rest // max(1, extents[0])))
        # From the wanted output to an input that gives it, and up to stride − 1 pixels more.
        slack = draw(st.integers(0, stride[axis] - 1))
        extents.append(
            max(least, (out - 1) * stride[axis] + kernel[axis] - 2 * padding[axis] + slack)
        )
    h, w = extents
    op = Conv2d(
        c,
        o,
        kernel,
        stride,
        padding,
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        relu=draw(st.booleans()),
    )
    shape = (n, c, h, w)
    plain = Conv2d(c, o, kernel, stride, padding)
    result = plain.infer(shape)
    assume(math.prod(shape) <= 4 * most and math.prod(result) <= 4 * most)
    return Problem(op, (shape, result) if op.residual else (shape,))


@st.composite
def _batchnorm(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    shape = draw(_images(sizes, most))
    return Problem(BatchNorm(shape[1], draw(st.sampled_from([1e-5, 1e-3, 0.1]))), (shape,))


@st.composite
def _any_shape(draw: st.DrawFn, sizes: Sequence[int], most: int) -> tuple[int, ...]:
    shape = draw(_images(sizes, most))
    return shape if draw(st.booleans()) else (shape[0], shape[1] * shape[2] * shape[3])


@st.composite
def _relu(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    return Problem(ReLU(), (draw(_any_shape(sizes, most)),))


@st.composite
def _add(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    shape = draw(_any_shape(sizes, most))
    return Problem(Add(relu=draw(st.booleans())), (shape, shape))


@st.composite
def _maxpool(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    if draw(st.booleans()):
        op = MaxPool2d((3, 3), (2, 2), (1, 1))
    else:
        kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
        stride = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
        padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
        op = MaxPool2d(kernel, stride, padding)
    n, c, h, w = draw(_images(sizes, most))
    h = max(h, op.kernel_size[0] - 2 * op.padding[0])
    w = max(w, op.kernel_size[1] - 2 * op.padding[1])
    return Problem(op, ((n, c, h, w),))


@st.composite
def _gap(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    return Problem(GlobalAvgPool(), (draw(_images(sizes, most)),))


@st.composite
def _linear(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    n = draw(st.sampled_from([1, 2, 3, 5, 8]))
    wide = sorted({*sizes, 10, 127, 512, 1000})
    features = draw(_size(wide, min(most, macs) // n))
    out = draw(_size(wide, min(most, macs // features) // n))
    return Problem(Linear(features, out), ((n, features),))


@st.composite
def _softmax(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    n = draw(st.sampled_from([1, 2, 3, 5, 8]))
    return Problem(Softmax(), ((n, draw(_size(sorted({*sizes, 10, 127, 1000}), most // n))),))


@st.composite
def _relayout(draw: st.DrawFn, sizes: Sequence[int], most: int, macs: int) -> Problem:
    forth = draw(st.booleans())
    source, target = (Layout.NCHW, Layout.NHWC) if forth else (Layout.NHWC, Layout.NCHW)
    return Problem(Relayout(source, target), (draw(_images(sizes, most)),))


_BY_OP: dict[type[Op], Callable[[Sequence[int], int, int], st.SearchStrategy[Problem]]] = {
    Conv2d: _conv,
    BatchNorm: _batchnorm,
    ReLU: _relu,
    Add: _add,
    MaxPool2d: _maxpool,
    GlobalAvgPool: _gap,
    Linear: _linear,
    Softmax: _softmax,
    Relayout: _relayout,
}
