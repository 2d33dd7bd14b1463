"""Corners: fixed problems on which kernels go wrong, shown to every kernel besides what is drawn.

A drawn problem has them by luck: padding on one axis alone, every pair of extents different, sums
so long that their operands are cut into blocks. Here they are by name, and small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

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
    Shape,
    Softmax,
)
from r18_oracle.generate.problems import normalization

GRID = 65_535
"""The blocks that a CUDA grid has at most along y and along z. A kernel that has a block there for
each channel, say, refuses more of them, or goes round again for those that are left over."""


MANY_TILES = 700
"""More than twice the blocks that the largest devices run at once, of a kernel whose blocks are
large (an H200: 132 multiprocessors, two on each)."""

TALL = 6_400
"""Rows of an image, of which each of so many blocks has several turns of four."""


def corners(op: type[Op], max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """The corners of an op that are not many times larger than what is drawn."""
    near = (*_BY_OP[op](), *_many_tiles(op))
    many = small_enough(_many(op), 20 * max_elements, 4 * max_macs)
    return (*small_enough(near, 8 * max_elements, 4 * max_macs), *many)


def many_tiles(op: type[Op], max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """Those of the corners that have more tiles than a device computes at once."""
    return small_enough(_many_tiles(op), 8 * max_elements, 4 * max_macs)


def small_enough(
    problems: Iterable[Problem], max_elements: int, max_macs: int
) -> tuple[Problem, ...]:
    """Those with so many elements in their largest tensor, and so many multiplications, at most."""
    return tuple(
        problem
        for problem in problems
        if problem.macs <= max_macs
        and max(map(math.prod, (*problem.inputs, problem.output))) <= max_elements
    )


def _many(op: type[Op]) -> Iterator[Problem]:
    """More channels, outputs or samples than a grid holds, and as little as can be besides."""
    beyond = GRID + 2
    shape = (1, beyond, 1, 1)
    if op is Conv2d:
        yield Problem(Conv2d(beyond, 1, (1, 1)), (shape,))
        yield Problem(Conv2d(1, beyond, (1, 1)), ((1, 1, 1, 1),))
    elif op is BatchNorm:
        yield Problem(BatchNorm(beyond), (shape,))
    elif op is MaxPool2d:
        yield Problem(MaxPool2d((1, 1), (1, 1)), (shape,))
    elif op is GlobalAvgPool:
        yield Problem(GlobalAvgPool(), (shape,))
    elif op is Relayout:
        yield Problem(Relayout(Layout.NCHW, Layout.NHWC), ((1, beyond, 1, 1),))
        yield Problem(Relayout(Layout.NHWC, Layout.NCHW), ((beyond, 1, 1, 1),))
    elif op is Normalize:
        yield Problem(normalization(beyond), (shape,))
        yield Problem(normalization(1), ((beyond, 1, 1, 1),))
    elif op is Linear:
        yield Problem(Linear(1, beyond), ((1, 1),))
        yield Problem(Linear(1, 1), ((beyond, 1),))
    elif op is Softmax:
        yield Problem(Softmax(), ((beyond, 1),))


def _fused(op: Conv2d, shape: Shape) -> Problem:
    full = Conv2d(
        *(op.in_channels, op.out_channels, op.kernel_size, op.stride, op.padding),
        bias=True,
        residual=True,
        relu=True,
    )
    return Problem(full, (shape, op.infer(shape)))


def _conv() -> Iterator[Problem]:
    # Padding on one axis alone, as in windows that are factorised.
    yield Problem(Conv2d(3, 5, (1, 3), (1, 1), (0, 1)), ((2, 3, 5, 7),))
    yield Problem(Conv2d(3, 5, (3, 1), (1, 1), (1, 0)), ((2, 3, 7, 5),))
    # Every pair differs: taps, strides, padding, height and width, channels.
    yield _fused(Conv2d(3, 5, (3, 5), (3, 2), (1, 3)), (2, 3, 11, 9))
    yield _fused(Conv2d(5, 3, (5, 3), (2, 3), (3, 1)), (3, 5, 8, 13))
    # A window larger than the image without its padding; one output; pixels never read.
    yield Problem(Conv2d(3, 2, (7, 7), (2, 2), (3, 3)), ((2, 3, 1, 2),))
    yield _fused(Conv2d(2, 3, (3, 2)), (3, 2, 3, 2))
    yield Problem(Conv2d(2, 3, (2, 1), (5, 4), (0, 0)), ((2, 2, 13, 11),))
    # An image wider than its padding, and narrower than twice that.
    yield _fused(Conv2d(2, 3, (7, 5), (1, 1), (3, 2)), (2, 2, 5, 3))
    # Padding as wide as the window: outputs that see nothing but zeros.
    yield _fused(Conv2d(2, 3, (2, 3), (1, 1), (2, 3)), (2, 2, 2, 3))
    # Several images of one row of outputs: a block of them is no matrix in the output.
    yield _fused(Conv2d(3, 2, (3, 3), (1, 1), (0, 1)), (5, 3, 3, 4))
    # An image of few channels, so tall that a block goes down several rows of it.
    yield Problem(Conv2d(1, 2, (7, 7), (2, 2), (3, 3), bias=True), ((1, 1, TALL, 5),))
    # Long sums for one output channel: a kernel that cuts its work by the size of its operands (4
    # MiB of unfolded columns, say) cuts within a single row here; then a batch with a few images
    # left over, in float64 and in float32; then each image into bands of rows, the last narrower.
    wide = Conv2d(64, 1, (7, 7), (1, 1), (3, 3))
    yield Problem(Conv2d(128, 1, (7, 7), (1, 1), (3, 3)), ((1, 128, 1, 84),))
    yield _fused(wide, (7, 64, 3, 8))
    yield _fused(wide, (15, 64, 3, 8))
    yield _fused(wide, (2, 64, 17, 11))


def _many_tiles(op: type[Op]) -> Iterator[Problem]:
    """More images than a device computes tiles at once: blocks that stay take several in turn. With
    channels for kernels that want them by the chunk."""
    if op is Conv2d:
        yield _fused(Conv2d(8, 8, (3, 3), (1, 1), (1, 1)), (MANY_TILES, 8, 1, 2))
        # Of channels for five tiles of 64: five does not divide the number of blocks (264 on an
        # H200), so that a block's next tile is of other channels.
        yield _fused(Conv2d(8, 264, (1, 1)), (120, 8, 1, 1))


def _maxpool() -> Iterator[Problem]:
    yield Problem(MaxPool2d((5, 3), (2, 3), (2, 1)), ((2, 3, 11, 7),))
    yield Problem(MaxPool2d((3, 5), (3, 2), (1, 2)), ((3, 2, 8, 13),))
    yield Problem(MaxPool2d((4, 4), (3, 3), (2, 2)), ((1, 2, 9, 10),))
    yield Problem(MaxPool2d((1, 2), (4, 5)), ((2, 2, 9, 12),))  # pixels never read
    yield Problem(MaxPool2d((3, 3), (2, 2), (1, 1)), ((2, 3, 1, 2),))
    yield Problem(MaxPool2d((5, 5), (1, 1), (2, 2)), ((2, 3, 3, 3),))
    yield Problem(MaxPool2d((5, 7), (1, 1)), ((2, 3, 5, 7),))


def _conv_maxpool() -> Iterator[Problem]:
    stem, overlap = MaxPool2d((3, 3), (2, 2), (1, 1)), MaxPool2d((3, 3), (1, 1), (1, 1))
    seven = (7, 7), (2, 2), (3, 3)
    # A ResNet's stem: rows and columns of the convolution even, odd, fewer than a window; with as
    # many channels as a kernel may want, and with as few as there can be.
    for n, o, bias, relu, h, w in (
        (1, 64, True, True, 13, 18),
        (2, 64, True, True, 8, 5),
        (2, 64, True, True, 1, 4),
        (2, 5, True, False, 15, 20),
        (2, 8, False, False, 22, 9),
        (1, 1, False, True, 2, 1),
    ):
        yield Problem(ConvMaxPool(Conv2d(3, o, *seven, bias, False, relu), stem), ((n, 3, h, w),))
    # So tall that a block goes down many rows, further than a ring of lines is long; as wide as two
    # blocks and a bit, or as one to the column, with padding of the pooling on one axis alone.
    small = Conv2d(1, 2, *seven, bias=True)
    yield Problem(ConvMaxPool(small, stem), ((1, 1, TALL, 5),))
    for padding, w in (((1, 1), 523), ((1, 0), 523), ((0, 1), 523), ((1, 0), 224), ((0, 1), 224)):
        pool = MaxPool2d((3, 3), (2, 2), padding)
        yield Problem(ConvMaxPool(small, pool), ((1, 1, 9, w),))
    # Windows of even width, and of as many columns as some kernels take.
    for window, ahead in (((4, 4), (1, 1)), ((3, 8), (1, 3)), ((5, 2), (2, 0))):
        conv = Conv2d(3, 8, window, (2, 2), ahead, bias=True, relu=True)
        yield Problem(ConvMaxPool(conv, stem), ((2, 3, 12, 18),))
    # Every pair differs, in both windows.
    conv = Conv2d(2, 3, (3, 5), (2, 1), (1, 3), bias=True)
    yield Problem(ConvMaxPool(conv, MaxPool2d((2, 3), (3, 2), (1, 0))), ((2, 2, 11, 9),))
    conv = Conv2d(3, 2, (5, 2), (1, 2), (0, 1), bias=True, relu=True)
    yield Problem(ConvMaxPool(conv, MaxPool2d((5, 4), (2, 3), (1, 2))), ((1, 3, 13, 14),))
    # The pool's padding where the convolution has none, and where it sees nothing but its own.
    yield Problem(ConvMaxPool(Conv2d(2, 3, (3, 3)), overlap), ((2, 2, 5, 6),))
    padded = Conv2d(2, 3, (2, 3), (1, 1), (2, 3), bias=True)
    yield Problem(ConvMaxPool(padded, overlap), ((2, 2, 2, 3),))
    # Windows that lie apart: outputs of the convolution that nothing needs; one output; no pooling.
    apart = MaxPool2d((1, 2), (4, 5))
    yield Problem(ConvMaxPool(Conv2d(3, 2, (3, 3), padding=(1, 1)), apart), ((2, 3, 9, 12),))
    whole = MaxPool2d((3, 4), (1, 1))
    yield Problem(ConvMaxPool(Conv2d(3, 2, (3, 2), bias=True), whole), ((3, 3, 5, 5),))
    yield Problem(ConvMaxPool(Conv2d(3, 4, (1, 1)), MaxPool2d((1, 1), (1, 1))), ((2, 3, 3, 5),))


def _relayout() -> Iterator[Problem]:
    for source in Layout:
        for target in Layout:  # to itself too: a copy
            yield Problem(Relayout(source, target), ((2, 3, 5, 7),))


def _normalize() -> Iterator[Problem]:
    # Rows that are no multiple of four bytes, planes that are and are not of whole vectors, images
    # of one pixel; grey, RGB, with a fourth channel, and more of them than a vector holds.
    for shape in ((2, 3, 5, 7), (3, 3, 4, 6), (2, 3, 8, 8), (2, 3, 1, 1)):
        yield Problem(normalization(3), (shape,))
    for shape in ((2, 1, 6, 5), (3, 4, 3, 4), (2, 17, 3, 2)):
        yield Problem(normalization(shape[1]), (shape,))
    # A mean far outside the pixels, and a deviation far from one.
    yield Problem(Normalize((-3.0, 100.0, 0.0), (1e-3, 1e3, 1.0)), ((2, 3, 4, 5),))


def _linear() -> Iterator[Problem]:
    for n, features, out in ((3, 17, 13), (1, 4097, 3), (5, 1, 1), (2, 3, 1021)):
        yield Problem(Linear(features, out), ((n, features),))


def _batchnorm() -> Iterator[Problem]:
    yield Problem(BatchNorm(3), ((2, 3, 5, 7),))
    yield Problem(BatchNorm(65, 1e-3), ((1, 65, 1, 1),))


def _gap() -> Iterator[Problem]:
    for shape in ((2, 3, 5, 7), (2, 3, 1, 1), (3, 2, 8, 4), (1, 65, 1, 9)):
        yield Problem(GlobalAvgPool(), (shape,))


def _softmax() -> Iterator[Problem]:
    for shape in ((3, 1), (2, 1021), (7, 3)):
        yield Problem(Softmax(), (shape,))


def _elementwise(*ops: Op) -> Iterator[Problem]:
    for op in ops:
        for shape in ((2, 3, 5, 7), (3, 1021), (1, 1)):
            yield Problem(op, (shape,) * op.arity)


_BY_OP = {
    Conv2d: _conv,
    BatchNorm: _batchnorm,
    ReLU: lambda: _elementwise(ReLU()),
    Add: lambda: _elementwise(Add(), Add(relu=True)),
    MaxPool2d: _maxpool,
    ConvMaxPool: _conv_maxpool,
    GlobalAvgPool: _gap,
    Linear: _linear,
    Softmax: _softmax,
    Relayout: _relayout,
    Normalize: _normalize,
}
