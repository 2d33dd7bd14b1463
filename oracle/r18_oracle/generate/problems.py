"""Strategies: problems that chase a kernel's edges, and those of the real network.

Draws shrink to the smallest failing problem: every size is drawn so that smaller comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hypothesis import assume
from hypothesis import strategies as st

from r18.backend import Kernel
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.passes import FUSION_LEVELS, fuse, fuse_pool
from r18.graph.schedule import Schedule
from r18.images.preprocess import Preprocess
from r18.runtime.arena import aligned
from r18_oracle.generate.stems import MULTIPLES, Stems, Window, near, square, takes

ODD = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 31, 33)
"""Sizes that any kernel is tried at: small, odd, prime, and around powers of two."""


def schedule_problems(schedule: Schedule, batches: Sequence[int]) -> tuple[Problem, ...]:
    """Every distinct problem of a network at every fusion level, softmax and relayouts included.

    Last come those that a plan has only where there is a kernel for them (`OPTIONAL_OPS`).
    """
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
    for batch in batches if len(schedule.input_shape) == 3 else ():
        normalize = normalization(schedule.input_shape[0])
        found.setdefault(Problem(normalize, ((batch, *schedule.input_shape),)))
    for batch in batches:
        for problem in fuse_pool(fuse(schedule, FUSION_LEVELS[-1])).problems(batch).values():
            found.setdefault(problem)
    return tuple(found)


def normalization(channels: int) -> Normalize:
    """Means and deviations as of photographs, no two channels alike; of three ImageNet's."""
    if channels == 3:
        return Preprocess().normalize
    mean = tuple(0.5 - k % 97 / 250 for k in range(channels))
    return Normalize(mean, tuple(0.2 + k % 89 / 300 for k in range(channels)))


@dataclass(frozen=True)
class Sizes:
    """Sizes to draw from: all of them, and those near a kernel's edges once more."""

    every: tuple[int, ...]
    near: tuple[int, ...] = ()

    @classmethod
    def of(cls, kernel: Kernel) -> Sizes:
        near = sorted({e + d for e in kernel.edges for d in (-1, 0, 1) if e + d >= 1})
        return cls(tuple(sorted({*near, *ODD})), tuple(near))

    def also(self, *more: int) -> Sizes:
        return Sizes(tuple(sorted({*self.every, *more})), self.near)

    def upto(self, most: int, *, edge: bool = False) -> st.SearchStrategy[int]:
        """One of at most `most`; where one fits, every other draw is near an edge, or with `edge`
        every draw."""
        every = st.sampled_from([s for s in self.every if s <= most] or [1])
        fitting = [s for s in self.near if s <= most]
        if not fitting:
            return every
        near = st.sampled_from(fitting)
        return near if edge else every | near


def problems(kernel: Kernel, max_elements: int, max_macs: int) -> st.SearchStrategy[Problem]:
    """Problems of the kernel's op, at most so large, or little larger.

    Three in four are made to fit a kernel that takes few: it would hardly be seen to run
    otherwise. The others it may refuse.
    """

    @cache  # to draw the same again, Hypothesis needs the same answer again
    def fit(problem: Problem) -> Problem:
        return fitted(kernel, problem, 4 * max_macs)

    @cache
    def taken(problem: Problem) -> bool:
        return takes(kernel, problem)

    sizes = Sizes.of(kernel)
    max_elements, max_macs = room_for(kernel, max_elements, max_macs)
    if kernel.op is Conv2d:
        drawn = _conv(sizes, max_elements, max_macs, windows_for(kernel))
    elif kernel.op is ConvMaxPool:
        drawn = _conv_maxpool(sizes, max_elements, max_macs, Stems.of(kernel))
    else:
        drawn = _BY_OP[kernel.op](sizes, max_elements, max_macs)
    accepted = drawn.map(fit).filter(taken)
    return st.one_of(accepted, accepted, accepted, drawn)


def room_for(kernel: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
    """The size of a drawn problem: as asked for, or as much as a kernel for large ones needs."""
    if kernel.op is ConvMaxPool:
        return Stems.of(kernel).room(max_elements, max_macs)
    return max_elements, max_macs


def fitted(kernel: Kernel, problem: Problem, max_macs: int) -> Problem:
    """The problem, its channels rounded up to what the kernel takes, where that is found."""
    if isinstance(problem.op, ConvMaxPool):
        others = near(problem)
    else:
        others = (_rounded(problem, multiple) for multiple in MULTIPLES)
    return next((p for p in others if p.macs <= max_macs and takes(kernel, p)), problem)


def windows_for(kernel: Kernel) -> tuple[Window, ...]:
    """Those of `WINDOWS` that a convolution kernel takes, or all where it seems to take none."""
    taken = tuple(w for w in WINDOWS if any(takes(kernel, probe) for probe in _probes(w)))
    return taken or WINDOWS


WINDOWS = ((3, 1, 1), (1, 1, 0), (3, 2, 1), (1, 2, 0), (7, 2, 3), (3, 1, 0))
"""Kernel size, stride and padding of the convolutions of ResNets, and one without padding."""


def _probes(window: Window) -> Iterator[Problem]:
    """Convolutions that a kernel which can do with this window is likely to take."""
    k, s, p = window
    for c, o, extent in ((3, 64, 32), (8, 8, 14), (64, 64, 28), (512, 512, 7)):
        yield Problem(Conv2d(c, o, (k, k), (s, s), (p, p)), ((1, c, extent, extent),))


def _rounded(problem: Problem, multiple: int) -> Problem:
    """The problem with its channels, or features, rounded up to a multiple."""
    op = problem.op
    if isinstance(op, Conv2d):
        (n, c, h, w), o = problem.inputs[0], aligned(op.out_channels, multiple)
        op = replace(op, in_channels=aligned(c, multiple), out_channels=o)
        shape = (n, op.in_channels, h, w)
        result = replace(op, residual=False).infer(shape)
        return Problem(op, (shape, result) if op.residual else (shape,))
    if isinstance(op, Linear):
        op = Linear(aligned(op.in_features, multiple), aligned(op.out_features, multiple))
        return Problem(op, ((problem.batch, op.in_features),))
    return problem


@st.composite
def _extents(
    draw: st.DrawFn, sizes: Mapping[str, Sizes], limits: Sequence[tuple[int, str]]
) -> dict[str, int]:
    """An extent for each axis (a letter), such that products stay within limits.

    limits: (most, axes): the product over these axes is at most that. The axes are drawn in any
    order, the first near an edge, so that each is large at times and at an edge at times; and
    each leaves room for 3 in every one to come, so that few problems have an axis of 1.
    """
    extents = dict.fromkeys(sizes, 1)
    order = draw(st.permutations(list(sizes)))
    for index, axis in enumerate(order):
        room = min(
            most // math.prod(extents[a] if a in order[:index] else 3 for a in axes if a != axis)
            for most, axes in limits
            if axis in axes
        )
        extents[axis] = draw(sizes[axis].upto(room, edge=index == 0))
    return extents


BATCHES = Sizes((1, 2, 3, 5, 8))


@st.composite
def _images(draw: st.DrawFn, sizes: Sizes, most: int) -> tuple[int, int, int, int]:
    """(N, C, H, W) of at most `most` elements."""
    axes = {"n": BATCHES, "c": sizes, "h": sizes, "w": sizes}
    extents = draw(_extents(axes, [(most, "nchw")]))
    return (extents["n"], extents["c"], extents["h"], extents["w"])


EPILOGUES = (
    *((bias, residual, relu) for relu in (False, True) for residual in (False, True)
      for bias in (False, True)),
    (True, True, True), (True, True, True), (True, True, True),
)  # fmt: skip
"""What is fused into a convolution. All at once more often: their order can be wrong only then."""


@st.composite
def _conv(
    draw: st.DrawFn, sizes: Sizes, most: int, macs: int, windows: Sequence[Window]
) -> Problem:
    """All strides, paddings and kernel sizes; half of the draws have one of the `windows`."""
    if draw(st.booleans()):
        k, s, p = draw(st.sampled_from(windows))
        kernel, stride, padding = (k, k), (s, s), (p, p)
    else:
        kernel = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
        stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
    # Extents of the output; the input's follow from them.
    axes = {"n": BATCHES, "c": sizes, "o": sizes, "h": sizes, "w": sizes}
    reads = most // math.prod(stride)
    limits = [(macs // math.prod(kernel), "ncohw"), (most, "nohw"), (reads, "nchw")]
    extents = draw(_extents(axes, limits))
    image = draw(_source((extents["h"], extents["w"]), kernel, stride, padding))
    bias, residual, relu = draw(st.sampled_from(EPILOGUES))
    plain = Conv2d(extents["c"], extents["o"], kernel, stride, padding)
    shape = (extents["n"], extents["c"], *image)
    result = plain.infer(shape)
    assume(math.prod(shape) <= 4 * most and math.prod(result) <= 4 * most)
    op = replace(plain, bias=bias, residual=residual, relu=relu)
    return Problem(op, (shape, result) if residual else (shape,))


@st.composite
def _source(
    draw: st.DrawFn,
    wanted: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> tuple[int, int]:
    """Extents that give the wanted ones, or the least that give any, and up to stride − 1 more."""
    found = []
    for out, k, s, p in zip(wanted, kernel, stride, padding, strict=True):
        slack = draw(st.integers(0, s - 1))
        found.append(max(1, k - 2 * p, (out - 1) * s + k - 2 * p + slack))
    return found[0], found[1]


FEW = 4
"""Channels of an image, at most."""


@st.composite
def _conv_maxpool(draw: st.DrawFn, sizes: Sizes, most: int, macs: int, stems: Stems) -> Problem:
    """All windows of both, but mostly those that the kernel takes, where it takes few; half of the
    draws have few channels.

    Edges are met by the pooled extents and by those of the convolution, in turn.
    """
    if draw(st.integers(0, 1 if stems.every_window else 7)):
        of_conv, of_pool = draw(st.sampled_from(stems.windows))
        plain, pool = Conv2d(1, 1, *square(of_conv)), MaxPool2d(*square(of_pool))
    else:
        kernel = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
        stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
        plain, pool = Conv2d(1, 1, kernel, stride, padding), draw(_pools(largest=4))
    pooled = draw(st.booleans())
    few = Sizes(tuple(c for c in stems.channels if c <= FEW) or stems.channels)
    whole = Sizes(tuple(stems.multiple * count for count in (1, 2, 3)))
    axes = {
        "n": BATCHES,
        "c": few if draw(st.booleans()) else sizes,
        "o": sizes if stems.multiple == 1 else whole,
        **dict.fromkeys("hw", sizes),
    }
    grows = math.prod(pool.stride) if pooled else 1
    limits = [
        (macs // math.prod(plain.kernel_size) // grows, "ncohw"),
        (most // grows, "nohw"),
        (most // math.prod(plain.stride) // grows, "nchw"),
    ]
    extents = draw(_extents(axes, limits))
    made = (extents["h"], extents["w"])
    if pooled:
        made = draw(_source(made, pool.kernel_size, pool.stride, pool.padding))
    else:  # those of the convolution, where a window fits
        (kh, kw), (ph, pw) = pool.kernel_size, pool.padding
        made = max(made[0], kh - 2 * ph), max(made[1], kw - 2 * pw)
    image = draw(_source(made, plain.kernel_size, plain.stride, plain.padding))
    bias, relu = draw(st.sampled_from([(b, r) for b, residual, r in EPILOGUES if not residual]))
    conv = replace(plain, in_channels=extents["c"], out_channels=extents["o"], bias=bias, relu=relu)
    shape = (extents["n"], extents["c"], *image)
    assume(math.prod(shape) <= 4 * most and math.prod(conv.infer(shape)) <= 4 * most)
    return Problem(ConvMaxPool(conv, pool), (shape,))


@st.composite
def _pools(draw: st.DrawFn, largest: int = 5) -> MaxPool2d:
    kernel = (draw(st.integers(1, largest)), draw(st.integers(1, largest)))
    stride = (draw(st.integers(1, largest + 1)), draw(st.integers(1, largest + 1)))
    padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
    return MaxPool2d(kernel, stride, padding)


@st.composite
def _batchnorm(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    shape = draw(_images(sizes, most))
    return Problem(BatchNorm(shape[1], draw(st.sampled_from([1e-5, 1e-3, 0.1]))), (shape,))


@st.composite
def _any_shape(draw: st.DrawFn, sizes: Sizes, most: int) -> tuple[int, ...]:
    shape = draw(_images(sizes, most))
    return shape if draw(st.booleans()) else (shape[0], shape[1] * shape[2] * shape[3])


@st.composite
def _relu(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    return Problem(ReLU(), (draw(_any_shape(sizes, most)),))


@st.composite
def _add(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    shape = draw(_any_shape(sizes, most))
    return Problem(Add(relu=draw(st.booleans())), (shape, shape))


@st.composite
def _maxpool(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    op = MaxPool2d((3, 3), (2, 2), (1, 1)) if draw(st.booleans()) else draw(_pools())
    n, c, h, w = draw(_images(sizes, most))
    h = max(h, op.kernel_size[0] - 2 * op.padding[0])
    w = max(w, op.kernel_size[1] - 2 * op.padding[1])
    return Problem(op, ((n, c, h, w),))


@st.composite
def _gap(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    return Problem(GlobalAvgPool(), (draw(_images(sizes, most)),))


@st.composite
def _linear(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    wide = sizes.also(10, 127, 512, 1000)
    axes = {"n": BATCHES, "k": wide, "o": wide}
    extents = draw(_extents(axes, [(macs, "nko"), (most, "nk"), (most, "no")]))
    return Problem(Linear(extents["k"], extents["o"]), ((extents["n"], extents["k"]),))


@st.composite
def _softmax(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    axes = {"n": BATCHES, "k": sizes.also(10, 127, 1000)}
    extents = draw(_extents(axes, [(most, "nk")]))
    return Problem(Softmax(), ((extents["n"], extents["k"]),))


@st.composite
def _relayout(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    forth = draw(st.booleans())
    source, target = (Layout.NCHW, Layout.NHWC) if forth else (Layout.NHWC, Layout.NCHW)
    return Problem(Relayout(source, target), (draw(_images(sizes, most)),))


@st.composite
def _normalize(draw: st.DrawFn, sizes: Sizes, most: int, macs: int) -> Problem:
    """Half of the draws are RGB, of which kernels think first."""
    n, c, h, w = draw(_images(sizes, most // 3))
    c = 3 if draw(st.booleans()) else c
    return Problem(normalization(c), ((n, c, h, w),))


_BY_OP: dict[type[Op], Callable[[Sizes, int, int], st.SearchStrategy[Problem]]] = {
    BatchNorm: _batchnorm,
    ReLU: _relu,
    Add: _add,
    MaxPool2d: _maxpool,
    GlobalAvgPool: _gap,
    Linear: _linear,
    Softmax: _softmax,
    Relayout: _relayout,
    Normalize: _normalize,
}
