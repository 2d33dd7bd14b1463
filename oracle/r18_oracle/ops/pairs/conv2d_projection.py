"""A convolution whose residual is the projection of a second input, as one op."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

import torch
from hypothesis import assume
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.graph.ops import Conv2d, ConvProjection, Problem, Shape, parts_of
from r18.runtime.arena import aligned
from r18_oracle.generate.sizes import BEYOND_GRID, BEYOND_INDEX, MULTIPLES, Sizes, along, takes
from r18_oracle.ops import conv2d
from r18_oracle.ops.conv2d import LONG, MANY_TILES, WINDOWS, channels_of
from r18_oracle.ops.spec import Arrays, Numbers, Summand, SumSpec, Tensors
from r18_oracle.ops.window import Pair, Window, numbers_of, source, square, window_of

T = TypeVar("T")

SHORTCUTS = ((1, 2, 0), (1, 1, 0))
"""Kernel size, stride and padding of the projections of ResNets."""

PREFIX = "projection_"
"""The start of the names of the projection's numbers."""


class ConvProjectionSpec(SumSpec[ConvProjection]):
    op = ConvProjection
    algorithms = ("sum",)

    def reference(self, op: ConvProjection, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        (x, z), (of_conv, of_projection) = inputs, _split(op, weights)
        residual = conv2d.SPEC.reference(op.projection, (z,), of_projection)
        return conv2d.SPEC.reference(op.conv, (x, residual), of_conv)

    def pytorch(self, op: ConvProjection, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        (x, z), (of_conv, of_projection) = inputs, _split(op, weights)
        residual = conv2d.SPEC.pytorch(op.projection, (z,), of_projection)
        return conv2d.SPEC.pytorch(op.conv, (x, residual), of_conv)

    def sums(self, op: ConvProjection, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        (x, z), (of_conv, of_projection) = inputs, _split(op, weights)
        projected = conv2d.SPEC.sums(op.projection, (z,), of_projection)
        return conv2d.SPEC.sums(op.conv, (x,), of_conv) + projected

    def summands(self, problem: Problem) -> tuple[Summand, ...]:
        op = problem.op
        assert isinstance(op, ConvProjection)
        (x, _), (projection, _) = problem.inputs, parts_of(problem)
        conv = Problem(replace(op.conv, residual=False), (x,))
        return Summand(conv), Summand(projection, 1, len(op.conv.weights()))

    def depth(self, op: ConvProjection) -> int:
        return op.depth

    def addends(self, op: ConvProjection, inputs: Arrays, weights: Arrays) -> Arrays:
        """Both biases."""
        (_, *biases), (_, *more) = _split(op, weights)
        return tuple(bias[:, None, None] for bias in (*biases, *more))

    def window_sum(self, op: ConvProjection, x: Array) -> Array:
        return conv2d.SPEC.window_sum(op.conv, x)

    # -- problems ------------------------------------------------------------------------------

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most, macs, windows_for(kernel), kernel.extras)

    def corners(self) -> Iterator[Problem]:
        # The last convolutions of a basic and of a bottleneck block. Images of odd and even extent
        # give as many outputs; half of the pixels of the second are never read.
        for biases in ((True, True), (True, False), (False, True), (False, False)):
            basic = Conv2d(8, 8, (3, 3), (1, 1), (1, 1), bias=biases[0], relu=all(biases))
            shortcut = Conv2d(4, 8, (1, 1), (2, 2), bias=biases[1])
            yield _joined(basic, (2, 8, 5, 4), shortcut, slack=(0, 1))
        bottleneck = Conv2d(16, 64, (1, 1), bias=True, relu=True)
        yield _joined(bottleneck, (2, 16, 3, 5), _shortcut(32, 64), slack=(1, 0))
        yield _joined(bottleneck, (1, 16, 7, 7), Conv2d(16, 64, (1, 1), bias=True))
        # Every pair differs, in both windows; padding of either alone; strides of both.
        yield _joined(
            Conv2d(3, 5, (3, 5), (3, 2), (1, 3), bias=True, relu=True),
            (2, 3, 11, 9),
            Conv2d(2, 5, (2, 1), (1, 3), (1, 0), bias=True),
            slack=(0, 2),
        )
        yield _joined(
            Conv2d(2, 3, (3, 2), bias=True),
            (2, 2, 6, 4),
            Conv2d(5, 3, (3, 3), (2, 1), (1, 1), bias=True),
        )
        # One output; one channel; outputs whose windows hold nothing but padding.
        yield _joined(Conv2d(3, 2, (3, 3), bias=True), (3, 3, 3, 3), _shortcut(1, 2))
        yield _joined(Conv2d(1, 1, (1, 1)), (1, 1, 1, 2), Conv2d(1, 1, (1, 1)))
        padded = Conv2d(2, 3, (2, 3), (1, 1), (2, 3), bias=True)
        yield _joined(padded, (2, 2, 2, 3), _shortcut(2, 3))
        # Products of the projection many times those of the convolution, in however many parts the
        # sum is split; wider than the images of the network; a batch that is no multiple of 64.
        yield _joined(Conv2d(8, 8, (1, 1), bias=True), (1, 8, 3, 3), _shortcut(LONG, 8))
        wide = Conv2d(8, 8, (1, 3), (1, 1), (0, 1), bias=True)
        yield _joined(wide, (1, 8, 1, 131), _shortcut(8, 8))
        yield _joined(Conv2d(8, 8, (1, 1)), (67, 8, 1, 2), _shortcut(8, 8))
        # Groups and dilation, in one of the two alone.
        grouped = Conv2d(6, 4, (3, 3), (1, 1), (1, 1), groups=2, bias=True)
        yield _joined(grouped, (2, 6, 4, 5), _shortcut(3, 4))
        plain = Conv2d(3, 4, (3, 3), (1, 1), (1, 1), bias=True)
        yield _joined(plain, (2, 3, 4, 5), Conv2d(6, 4, (1, 1), (2, 2), groups=2))
        dilated = Conv2d(3, 4, (3, 3), (1, 1), (2, 2), dilation=(2, 2), bias=True)
        yield _joined(dilated, (2, 3, 4, 5), _shortcut(2, 4))
        yield _joined(plain, (1, 3, 4, 5), Conv2d(2, 4, (2, 2), dilation=(2, 3), bias=True))

    def many(self) -> Iterator[Problem]:
        one = Conv2d(1, 1, (1, 1))
        yield _joined(one, (1, 1, 1, 1), Conv2d(BEYOND_GRID, 1, (1, 1)))
        yield _joined(
            replace(one, out_channels=BEYOND_GRID), (1, 1, 1, 1), Conv2d(1, BEYOND_GRID, (1, 1))
        )

    def many_tiles(self) -> Iterator[Problem]:
        """With channels for kernels that require a multiple of 8."""
        small = Conv2d(8, 8, (3, 3), (1, 1), (1, 1), bias=True, relu=True)
        yield _joined(small, (MANY_TILES, 8, 1, 2), _shortcut(8, 8))
        # Channels for five tiles of 64, as for a convolution alone.
        yield _joined(Conv2d(8, 264, (1, 1), bias=True), (120, 8, 1, 1), _shortcut(8, 264))

    def vast(self) -> Iterator[Problem]:
        yield from super().vast()
        # The outputs are small enough, and one of the images, or the weights of either, are not.
        one = Conv2d(1, 1, (1, 1))
        yield _joined(one, (1, 1, 2, 1), Conv2d(1, 1, (1, 1), (BEYOND_INDEX, 1)))
        vast = Conv2d(1, 1, (1, 1), (BEYOND_INDEX, 1))
        yield _joined(vast, (1, 1, BEYOND_INDEX + 1, 1), one)
        yield _joined(Conv2d(1, 2**16, (1, 1)), (1, 1, 1, 1), Conv2d(2**15, 2**16, (1, 1)))
        yield _joined(Conv2d(2**15, 2**16, (1, 1)), (1, 2**15, 1, 1), Conv2d(1, 2**16, (1, 1)))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        window, shortcut = windows_for(kernel)[0]
        (side, _), (stride, _), (padding, _) = square(window)
        for n, c, k, o, oh, ow in along(size, 2, 3, 4, 2, 4, 3, full=(3, 5)):
            h, w = ((out - 1) * stride + max(1, side - 2 * padding) for out in (oh, ow))
            conv = Conv2d(c, o, *square(window), bias=True)
            yield _joined(conv, (n, c, h, w), Conv2d(k, o, *square(shortcut), bias=True))

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        """Channels rounded up to what a kernel may require; then without what is fused."""
        op = problem.op
        assert isinstance(op, ConvProjection)
        slack = _slack(problem)
        n, c, h, w = problem.inputs[0]
        for multiple in MULTIPLES:
            out, first = aligned(op.conv.out_channels, multiple), aligned(c, multiple)
            second = aligned(op.projection.in_channels, multiple)
            if first % op.conv.groups or second % op.projection.groups:
                continue
            if out % op.conv.groups or out % op.projection.groups:
                continue
            conv = replace(op.conv, in_channels=first, out_channels=out)
            projection = replace(op.projection, in_channels=second, out_channels=out)
            yield _joined(conv, (n, first, h, w), projection, slack)
        yield from self.plainer(problem)

    def plainer(self, problem: Problem) -> Iterator[Problem]:
        """Without ReLU, then without the biases too."""
        op = problem.op
        assert isinstance(op, ConvProjection)
        conv = replace(op.conv, relu=False)
        if op.relu:
            yield Problem(ConvProjection(conv, op.projection), problem.inputs)
        if op.conv.bias or op.projection.bias:
            bare = ConvProjection(replace(conv, bias=False), replace(op.projection, bias=False))
            yield Problem(bare, problem.inputs)

    def numbers(self, problem: Problem) -> Numbers:
        """Those of both convolutions; in place of the second image's extents the pixels that lie
        behind its last window."""
        op = problem.op
        assert isinstance(op, ConvProjection)
        second = numbers_of(op.projection) | channels_of(op.projection)
        del second["o"]  # the convolution's
        second |= {"bias": int(op.projection.bias)}
        second |= dict(zip(("slack_h", "slack_w"), _slack(problem), strict=True))
        conv, _ = self.summands(problem)
        first = conv2d.SPEC.numbers(conv.problem)
        return first | {f"{PREFIX}{name}": number for name, number in second.items()}

    def rebuild(self, op: ConvProjection, numbers: Numbers) -> Problem:
        conv = conv2d.SPEC.rebuild(op.conv, numbers | {"residual": 0})
        assert isinstance(conv.op, Conv2d)
        of = {name.removeprefix(PREFIX): n for name, n in numbers.items() if PREFIX in name}
        channels, groups = of["groups"] * of["c"], of["groups"]
        projection = Conv2d(
            channels,
            conv.op.out_channels,
            *window_of(of),
            bias=bool(of["bias"]),
            groups=groups,
            dilation=(of["dilation_h"], of["dilation_w"]),
        )
        slack = of["slack_h"], of["slack_w"]
        return _joined(conv.op, conv.inputs[0], projection, slack)

    # -- inputs --------------------------------------------------------------------------------

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """Activations around 100, weights of mean zero, in both products."""
        return tuple(x + 100.0 for x in inputs), tuple(
            w - w.mean(axis=(1, 2, 3), keepdims=True) if w.ndim > 1 else w for w in weights
        )


def _split(op: ConvProjection, weights: tuple[T, ...]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """The weights of the convolution and those of the projection."""
    count = len(op.conv.weights())
    return weights[:count], weights[count:]


def _shortcut(channels: int, outputs: int) -> Conv2d:
    """The projection of a ResNet's first block of a stage, with its bias."""
    return Conv2d(channels, outputs, *square(SHORTCUTS[0]), bias=True)


def _joined(conv: Conv2d, image: Shape, projection: Conv2d, slack: Pair = (0, 0)) -> Problem:
    """The problem whose second image gives the projection as many outputs as the convolution has.

    slack: rows and columns behind its last window. Raises `ShapeError` where there is no such
    image.
    """
    n, _, *outputs = replace(conv, residual=False).infer(image)
    behind = zip(outputs, _least(projection), projection.stride, slack, strict=True)
    height, width = ((out - 1) * stride + least + more for out, least, stride, more in behind)
    op = ConvProjection(replace(conv, residual=True), projection)
    return Problem(op, (image, (n, projection.in_channels, height, width)))


def _least(op: Conv2d) -> Pair:
    """Rows and columns of the smallest image that gives one output."""
    spans = (d * (k - 1) + 1 for k, d in zip(op.kernel_size, op.dilation, strict=True))
    height, width = (span - 2 * p for span, p in zip(spans, op.padding, strict=True))
    return height, width


def _slack(problem: Problem) -> Pair:
    op = problem.op
    assert isinstance(op, ConvProjection)
    extents = zip(
        problem.inputs[1][2:],
        problem.output[2:],
        _least(op.projection),
        op.projection.stride,
        strict=True,
    )
    height, width = (extent - (out - 1) * s - least for extent, out, least, s in extents)
    return height, width


def windows_for(kernel: Kernel) -> tuple[tuple[Window, Window], ...]:
    """The windows of a convolution and its projection that a kernel takes, or all if it seems to
    take none: `WINDOWS` with `SHORTCUTS`."""
    pairs = tuple(product(WINDOWS, SHORTCUTS))
    taken = tuple(pair for pair in pairs if any(takes(kernel, one) for one in _probes(*pair)))
    return taken or pairs


def _probes(window: Window, shortcut: Window) -> Iterator[Problem]:
    """Blocks with these windows that most kernels for them take."""
    for c, k, o in ((3, 2, 5), (8, 8, 8), (64, 64, 128), (128, 256, 512)):
        conv = Conv2d(c, o, *square(window), bias=True, relu=True)
        yield _joined(conv, (1, c, 14, 14), Conv2d(k, o, *square(shortcut), bias=True))


@st.composite
def _problems(
    draw: st.DrawFn,
    sizes: Sizes,
    most: int,
    macs: int,
    windows: Sequence[tuple[Window, Window]],
    extras: frozenset[str],
) -> Problem:
    """A convolution with any window and epilogue, and a projection with any.

    Half of the convolutions have a window of `windows`, and most of their projections the other.
    """
    firsts = tuple(dict.fromkeys(first for first, _ in windows))
    problem = draw(conv2d.convolutions(sizes, most, max(1, macs // 2), firsts, extras))
    conv = problem.op
    assert isinstance(conv, Conv2d)
    n, outputs, *extents = problem.output
    own = conv.kernel_size, conv.stride, conv.padding
    others = [second for first, second in windows if square(first) == own]
    if others and draw(st.sampled_from((True, True, True, False))):
        window, stride, padding = square(draw(st.sampled_from(others)))
    else:
        window = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        padding = (draw(st.integers(0, window[0] - 1)), draw(st.integers(0, window[1] - 1)))
    made = n * math.prod(extents)
    room = min(most // (made * math.prod(stride)), macs // 2 // (made * outputs))
    channels = draw(sizes.upto(max(1, room // math.prod(window)), edge=draw(st.booleans())))
    bias = draw(st.sampled_from((True, True, True, False)))
    projection = Conv2d(channels, outputs, window, stride, padding, bias=bias)
    image = draw(source((extents[0], extents[1]), window, stride, padding))
    op = ConvProjection(replace(conv, residual=True), projection)
    shape = (n, channels, *image)
    assume(projection.infer(shape) == problem.output and math.prod(shape) <= 4 * most)
    return Problem(op, (problem.inputs[0], shape))


SPEC = ConvProjectionSpec()
