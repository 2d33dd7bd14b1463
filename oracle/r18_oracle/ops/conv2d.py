"""Convolution with zero padding, and bias, residual and ReLU in its epilogue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Array, Kernel
from r18.graph.ops import Conv2d, Problem, Shape
from r18.runtime.arena import aligned
from r18_oracle.generate.sizes import (
    BATCHES,
    BEYOND_GRID,
    BEYOND_INDEX,
    MULTIPLES,
    Sizes,
    along,
    extents,
    takes,
)
from r18_oracle.ops.spec import FLAGS, Arrays, Numbers, Rng, SumSpec, Tensors, pick, shape_of
from r18_oracle.ops.window import Pair, Window, numbers_of, pixel, source, square, window_of
from r18_oracle.threads import threads_for

WINDOWS = ((3, 1, 1), (1, 1, 0), (3, 2, 1), (1, 2, 0), (7, 2, 3), (3, 1, 0))
"""Kernel size, stride and padding of the convolutions of ResNets, and one without padding."""

EPILOGUES = (
    *((bias, residual, relu) for relu in (False, True) for residual in (False, True)
      for bias in (False, True)),
    (True, True, True), (True, True, True), (True, True, True),
)  # fmt: skip
"""(bias, residual, relu). All three together more often: only then can their order be wrong."""

MANY_TILES = 700
"""More than twice the large blocks that the largest devices run at a time (an H200 has 132
multiprocessors and runs two such blocks on each)."""

TALL = 6_400
"""Rows of an image such that each of `MANY_TILES` blocks takes several steps of four rows."""

LONG = 1_100
"""Input channels that give each part of a split sum several steps, into however many parts it is
split."""


class Conv2dSpec(SumSpec[Conv2d]):
    op = Conv2d
    algorithms = ("sum", "winograd_f2x2", "winograd_f4x4", "transforms")

    def reference(self, op: Conv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        y = self.sums(op, inputs, weights)
        if op.bias:
            y = y + weights[1][:, None, None]
        if op.residual:
            y = y + inputs[1]
        return F.relu(y) if op.relu else y

    def pytorch(self, op: Conv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        bias = weights[1] if op.bias else None
        y = F.conv2d(inputs[0], weights[0], bias, *around(op))
        y = y + inputs[1] if op.residual else y
        return F.relu(y) if op.relu else y

    def sums(self, op: Conv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return F.conv2d(inputs[0], weights[0], None, *around(op))

    def depth(self, op: Conv2d) -> int:
        return op.depth

    def addends(self, op: Conv2d, inputs: Arrays, weights: Arrays) -> Arrays:
        bias = (weights[1][:, None, None],) if op.bias else ()
        return (*bias, *inputs[1:])

    def window_sum(self, op: Conv2d, x: Array) -> Array:
        """Shape (N, 1, OH, OW), or (N, O, OH, OW) for several groups."""
        ones = torch.ones((op.groups, op.group_channels, *op.kernel_size), dtype=torch.float64)
        with torch.inference_mode(), threads_for(x.size):
            images = torch.from_numpy(np.ascontiguousarray(x))
            total: Array = F.conv2d(images, ones, None, *around(op)).numpy()
        return total.repeat(op.out_channels // op.groups, axis=1) if op.groups > 1 else total

    # -- problems ------------------------------------------------------------------------------

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return convolutions(Sizes.of(kernel), most, macs, windows_for(kernel), kernel.extras)

    def corners(self) -> Iterator[Problem]:
        # Padding on one axis only, as in factorised windows.
        yield Problem(Conv2d(3, 5, (1, 3), (1, 1), (0, 1)), ((2, 3, 5, 7),))
        yield Problem(Conv2d(3, 5, (3, 1), (1, 1), (1, 0)), ((2, 3, 7, 5),))
        # Every pair differs: window, stride, padding, height and width, channels.
        yield fused(Conv2d(3, 5, (3, 5), (3, 2), (1, 3)), (2, 3, 11, 9))
        yield fused(Conv2d(5, 3, (5, 3), (2, 3), (3, 1)), (3, 5, 8, 13))
        # A window larger than the image without its padding; one output; pixels never read.
        yield Problem(Conv2d(3, 2, (7, 7), (2, 2), (3, 3)), ((2, 3, 1, 2),))
        yield fused(Conv2d(2, 3, (3, 2)), (3, 2, 3, 2))
        yield Problem(Conv2d(2, 3, (2, 1), (5, 4), (0, 0)), ((2, 2, 13, 11),))
        # An image wider than its padding, but less than twice as wide.
        yield fused(Conv2d(2, 3, (7, 5), (1, 1), (3, 2)), (2, 2, 5, 3))
        # Padding as wide as the window: outputs that see only zeros. Then enough rows of such
        # outputs for a whole thread.
        yield fused(Conv2d(2, 3, (2, 3), (1, 1), (2, 3)), (2, 2, 2, 3))
        yield fused(Conv2d(2, 3, (1, 3), (1, 1), (6, 1)), (1, 2, 1, 5))
        # Several images with one row of outputs each: a block of them is no matrix in the output.
        yield fused(Conv2d(3, 2, (3, 3), (1, 1), (0, 1)), (5, 3, 3, 4))
        # One channel and one column of outputs, with a horizontal stride that is not used. Then a
        # stride that is wider than all that the outputs see.
        yield Problem(Conv2d(1, 8, (7, 7), (1, 2), (3, 3)), ((1, 1, 8, 2),))
        yield fused(Conv2d(1, 3, (5, 5), (1, 3), (2, 1)), (2, 1, 5, 3))
        yield fused(Conv2d(1, 3, (3, 1), (1, 2), (1, 0)), (2, 1, 5, 2))
        # Wider than the images of the network; a batch that is no multiple of 64.
        yield fused(Conv2d(1, 3, (1, 3), (1, 1), (0, 1)), (1, 1, 1, 131))
        yield fused(Conv2d(2, 3, (1, 1)), (67, 2, 1, 2))
        # Windows that outgrow shared memory, as a whole and in each row; strides, windows and
        # padding beyond what TMA's im2col mode encodes; rows longer than its boxes hold. Eight
        # channels, for kernels that require a multiple of them.
        yield fused(Conv2d(1, 2, (20, 20)), (1, 1, 20, 21))
        yield fused(Conv2d(8, 8, (1, 400)), (1, 8, 1, 401))
        yield fused(Conv2d(8, 8, (1, 1), (9, 9)), (1, 8, 10, 19))
        yield fused(Conv2d(8, 8, (1, 150)), (1, 8, 1, 260))
        yield fused(Conv2d(8, 8, (50, 1)), (1, 8, 56, 36))
        # An image of few channels, so tall that each block computes several rows of it.
        yield Problem(Conv2d(1, 2, (7, 7), (2, 2), (3, 3), bias=True), ((1, 1, TALL, 5),))
        # Long sums for one output channel. A kernel that splits its work by the size of its
        # operands (4 MiB of im2col columns, say) splits within a row here; then a batch with a few
        # images left over, in float64 and in float32; then each image into bands of rows, the last
        # one narrower.
        wide = Conv2d(64, 1, (7, 7), (1, 1), (3, 3))
        yield Problem(Conv2d(128, 1, (7, 7), (1, 1), (3, 3)), ((1, 128, 1, 84),))
        yield fused(wide, (7, 64, 3, 8))
        yield fused(wide, (15, 64, 3, 8))
        yield fused(wide, (2, 64, 17, 11))
        yield from grouped_or_dilated()

    def ordinary(self, kernel: Kernel) -> Iterator[Problem]:
        for window in windows_for(kernel):
            extent = window[0] + 4
            op = Conv2d(3, 4, *square(window), bias=True)
            yield Problem(op, ((2, 3, extent, extent + 1),))
        for window in windows_for(kernel):
            yield from _probes(window)
        if kernel.extras:
            yield from grouped_or_dilated()

    def growing(self, kernel: Kernel) -> Iterator[Problem]:
        """Problems with bias and residual, whose place depends on the round. A wide window makes
        many columns of few pixels, and an image of one row grows to any height."""
        for window in windows_for(kernel):
            extent = window[0] + 4
            yield fused(Conv2d(1, 2, *square(window)), (1, 1, extent, extent + 1))
        yield fused(Conv2d(8, 2, (11, 11), (1, 1), (5, 5)), (1, 8, 3, 5))

    def many(self) -> Iterator[Problem]:
        yield Problem(Conv2d(BEYOND_GRID, 1, (1, 1)), ((1, BEYOND_GRID, 1, 1),))
        yield Problem(Conv2d(1, BEYOND_GRID, (1, 1)), ((1, 1, 1, 1),))

    def vast(self) -> Iterator[Problem]:
        yield from super().vast()
        # The tensors are small enough, and the image with its padding, or the weights, are not.
        yield Problem(Conv2d(1, 1, (3, 1), (1, 1), (1, 0)), ((1, 1, BEYOND_INDEX - 1, 1),))
        yield Problem(Conv2d(1, 2, (7, 7), (2, 2), (3, 3)), ((1, 1, BEYOND_INDEX // 2, 1),))
        yield Problem(Conv2d(2**15, 2**16, (1, 1)), ((1, 2**15, 1, 1),))
        yield Problem(Conv2d(1, 2**25, (7, 7), (2, 2), (3, 3)), ((1, 1, 7, 7),))

    def many_tiles(self) -> Iterator[Problem]:
        """Problems of many tiles, with channels for kernels that require a multiple of 8."""
        yield fused(Conv2d(8, 8, (3, 3), (1, 1), (1, 1)), (MANY_TILES, 8, 1, 2))
        # Channels for five tiles of 64. Five does not divide the number of blocks (264 on an H200),
        # so a block's next tile covers other channels.
        yield fused(Conv2d(8, 264, (1, 1)), (120, 8, 1, 1))
        # Tiles of 64 channels for two rounds of 256 blocks, where a tile ends with its first stage;
        # for more if clusters of blocks share the sum of each.
        yield fused(Conv2d(8, 32_768, (1, 1)), (1, 8, 1, 1))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        k, s, p = windows_for(kernel)[0]
        for n, c, o, oh, ow in along(size, 2, 3, 2, 4, 3, full=(2, 4)):
            h, w = ((extent - 1) * s + max(1, k - 2 * p) for extent in (oh, ow))
            plain = Conv2d(c, o, (k, k), (s, s), (p, p))
            op = replace(plain, bias=True, residual=True)
            yield Problem(op, ((n, c, h, w), plain.infer((n, c, h, w))))

    def beyond(self, choice: Kernel) -> Iterator[Problem]:
        """Matrix products one beyond the two largest edges in rows and columns, and a long sum."""
        for edge in sorted(choice.edges)[-2:]:
            yield _product(edge + 1, edge + 1, 3)
        yield _product(9, 27, LONG)

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        """Channels rounded up to what a kernel may require, and groups made as in ResNeXt; then
        without what is fused.
        """
        op = problem.op
        assert isinstance(op, Conv2d)
        n, c, h, w = problem.inputs[0]
        for multiple in MULTIPLES:
            channels, out = aligned(c, multiple), aligned(op.out_channels, multiple)
            if channels % op.groups or out % op.groups:
                continue
            rounded = replace(op, in_channels=channels, out_channels=out)
            yield with_residual(rounded, (n, channels, h, w))
        if op.groups > 1:
            yield _narrow(op, n, h, w)
        yield from self.plainer(problem)

    def plainer(self, problem: Problem) -> Iterator[Problem]:
        """The problem without residual and ReLU, then also without the bias."""
        op = problem.op
        assert isinstance(op, Conv2d)
        if op.residual or op.relu:
            op = replace(op, residual=False, relu=False)
            yield Problem(op, problem.inputs[:1])
        if op.bias:
            yield Problem(replace(op, bias=False), problem.inputs[:1])

    def numbers(self, problem: Problem) -> Numbers:
        op = problem.op
        assert isinstance(op, Conv2d)
        shape = dict(zip("nchw", problem.inputs[0], strict=True))
        flags = {name: int(getattr(op, name)) for name in FLAGS}
        return shape | numbers_of(op) | channels_of(op) | flags

    def rebuild(self, op: Conv2d, numbers: Numbers) -> Problem:
        groups = numbers["groups"]
        channels = groups * numbers["c"], groups * numbers["o"]
        dilation = numbers["dilation_h"], numbers["dilation_w"]
        bias, residual, relu = (bool(numbers[name]) for name in FLAGS)
        found = Conv2d(
            *channels,
            *window_of(numbers),
            bias=bias,
            residual=residual,
            relu=relu,
            groups=groups,
            dilation=dilation,
        )
        return with_residual(found, shape_of(numbers | {"c": channels[0]}))

    # -- inputs --------------------------------------------------------------------------------

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        assert isinstance(problem.op, Conv2d)
        return meeting_in(problem.op, problem.inputs[0], pick(rng, problem.output), rng)


def meeting_in(op: Conv2d, image: Shape, output: Shape, rng: Rng) -> tuple[Shape, Shape]:
    """The indices of a pixel and a weight whose product is in this output."""
    n, o, i, j = output
    c, r, s = pick(rng, (op.group_channels, *op.kernel_size))
    group = o // (op.out_channels // op.groups)
    channel = group * op.group_channels + c
    taps = (r * op.dilation[0], s * op.dilation[1])
    return (n, channel, *pixel(op, image, (i, j), taps)), (o, c, r, s)


def around(op: Conv2d) -> tuple[Pair, Pair, Pair, int]:
    """Arguments of PyTorch's convolutions after weight and bias: stride, padding, dilation,
    groups."""
    return op.stride, op.padding, op.dilation, op.groups


def channels_of(op: Conv2d) -> Numbers:
    """Numbers that shrinking may reduce: groups, the channels of each, and dilation."""
    return {
        "c": op.group_channels,
        "o": op.out_channels // op.groups,
        "groups": op.groups,
        "dilation_h": op.dilation[0],
        "dilation_w": op.dilation[1],
    }


def grouped_or_dilated() -> Iterator[Problem]:
    """Corners of groups and dilation; every kernel either computes them or refuses them."""
    # Groups of several channels, of other numbers in and out; each group one channel wide; one
    # output a group; as ResNeXt has them, with the stride of a stage.
    yield fused(Conv2d(6, 9, (3, 3), (1, 1), (1, 1), groups=3), (2, 6, 4, 5))
    yield fused(Conv2d(5, 5, (3, 2), (2, 1), (1, 0), groups=5), (2, 5, 6, 4))
    yield fused(Conv2d(8, 2, (1, 3), (1, 2), (0, 1), groups=2), (3, 8, 2, 7))
    yield fused(Conv2d(128, 128, (3, 3), (2, 2), (1, 1), groups=32), (1, 128, 6, 5))
    # Every pair differs; a dilated window wider than the image; taps that are all in the padding;
    # a stride between the taps; no padding.
    yield fused(Conv2d(3, 5, (3, 2), (1, 2), (2, 1), dilation=(2, 3)), (2, 3, 9, 8))
    yield fused(Conv2d(2, 3, (3, 3), (1, 1), (4, 4), dilation=(4, 4)), (2, 2, 3, 2))
    yield fused(Conv2d(2, 3, (2, 3), (1, 1), (5, 3), dilation=(5, 1)), (1, 2, 2, 3))
    yield fused(Conv2d(3, 2, (3, 3), (3, 3), (2, 2), dilation=(2, 2)), (2, 3, 11, 8))
    yield fused(Conv2d(2, 3, (3, 2), dilation=(1, 4)), (2, 2, 5, 7))
    # Both; and taps so far apart that the pixels under a tile of outputs outgrow shared memory.
    yield fused(Conv2d(4, 6, (3, 3), (1, 1), (2, 2), groups=2, dilation=(2, 2)), (2, 4, 5, 4))
    yield fused(Conv2d(64, 64, (3, 3), (1, 1), (6, 6), groups=16, dilation=(6, 6)), (1, 64, 3, 8))


def fused(op: Conv2d, shape: Shape) -> Problem:
    """The convolution with bias, residual and ReLU."""
    return with_residual(replace(op, bias=True, residual=True, relu=True), shape)


def with_residual(op: Conv2d, shape: Shape) -> Problem:
    """The problem of this input shape, and of a residual where the op adds one."""
    if not op.residual:
        return Problem(op, (shape,))
    return Problem(op, (shape, replace(op, residual=False).infer(shape)))


def _product(rows: int, columns: int, depth: int) -> Problem:
    """A 1×1 convolution, which is a matrix product, of at least `columns` columns. The image is
    narrow."""
    op = Conv2d(depth, rows, (1, 1), bias=True, residual=True, relu=True)
    height, width = -(-columns // 13), 13
    return Problem(op, ((1, depth, height, width), (1, rows, height, width)))


def windows_for(kernel: Kernel) -> tuple[Window, ...]:
    """The `WINDOWS` that a kernel takes, or all if it seems to take none."""
    taken = tuple(w for w in WINDOWS if any(takes(kernel, probe) for probe in _probes(w)))
    return taken or WINDOWS


def _probes(window: Window) -> Iterator[Problem]:
    """Convolutions with this window that most kernels for it take."""
    for c, o, extent in ((3, 64, 32), (8, 8, 14), (64, 64, 28), (512, 512, 7)):
        yield Problem(Conv2d(c, o, *square(window)), ((1, c, extent, extent),))


NARROW = (4, 8, 16, 32)
"""The channels of a group in the stages of `resnext50_32x4d`."""


def _narrow(op: Conv2d, n: int, h: int, w: int) -> Problem:
    """The convolution by 3×3 windows, with a multiple of 64 channels in narrow groups.

    The image has as many rows and columns as a window needs at least.
    """
    channels = aligned(max(op.in_channels, op.out_channels), 64)
    width = min(one for one in NARROW if one >= min(op.group_channels, NARROW[-1]))
    made = replace(op, in_channels=channels, out_channels=channels, kernel_size=(3, 3), groups=1)
    made = replace(made, groups=channels // width)
    sides = zip((h, w), made.dilation, made.padding, strict=True)
    high, wide = (max(side, 2 * d + 1 - 2 * p) for side, d, p in sides)
    return with_residual(made, (n, channels, high, wide))


@st.composite
def convolutions(
    draw: st.DrawFn,
    sizes: Sizes,
    most: int,
    macs: int,
    windows: Sequence[Window],
    extras: frozenset[str] = frozenset(),
) -> Problem:
    """All strides, paddings and kernel sizes; half of the draws have one of the `windows`.

    extras: of those that the kernel computes, each is in half of the draws. Every second draw of
    groups is as in ResNeXt: as many output as input channels, a multiple of 64.
    """
    if draw(st.booleans()):
        kernel, stride, padding = square(draw(st.sampled_from(windows)))
    else:
        kernel = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
        stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
        padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
    groups, of_group, dilation = 1, sizes, (1, 1)
    if "groups" in extras and draw(st.booleans()):
        if draw(st.booleans()):
            width = draw(st.sampled_from(NARROW))
            groups, of_group = draw(st.integers(1, 3)) * 64 // width, Sizes((width,))
        else:
            groups = draw(st.sampled_from((2, 3, 4, 8, 32)))
    if "dilation" in extras and draw(st.booleans()):
        dilation = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    most, macs = max(1, most // groups), max(1, macs // groups)
    span = (1 + dilation[0] * (kernel[0] - 1), 1 + dilation[1] * (kernel[1] - 1))
    # Extents of the output, and channels of a group; the input's follow from them.
    axes = {"n": BATCHES, "c": of_group, "o": of_group, "h": sizes, "w": sizes}
    reads = most // math.prod(stride)
    limits = [(macs // math.prod(kernel), "ncohw"), (most, "nohw"), (reads, "nchw")]
    drawn = draw(extents(axes, limits))
    image = draw(source((drawn["h"], drawn["w"]), span, stride, padding))
    bias, residual, relu = draw(st.sampled_from(EPILOGUES))
    channels, outputs = groups * drawn["c"], groups * drawn["o"]
    plain = Conv2d(channels, outputs, kernel, stride, padding, groups=groups, dilation=dilation)
    shape = (drawn["n"], channels, *image)
    result = plain.infer(shape)
    most *= groups
    assume(math.prod(shape) <= 4 * most and math.prod(result) <= 4 * most)
    op = replace(plain, bias=bias, residual=residual, relu=relu)
    return Problem(op, (shape, result) if residual else (shape,))


SPEC = Conv2dSpec()
