"""A convolution and the max-pooling of its outputs, as one op."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem, Shape, parts_of
from r18_oracle.generate.sizes import BATCHES, BEYOND_INDEX, Sizes, along, extents
from r18_oracle.generate.stems import Stems, near
from r18_oracle.ops import conv2d, maxpool2d
from r18_oracle.ops.conv2d import EPILOGUES, TALL, channels_of, meeting_in
from r18_oracle.ops.spec import Arrays, Numbers, OpSpec, Rng, Tensors, flags_of, pick
from r18_oracle.ops.window import numbers_of, pixel, source, square, window_of

FEW = 4
"""The most channels of an image."""


class ConvMaxPoolSpec(OpSpec[ConvMaxPool]):
    op = ConvMaxPool
    algorithms = conv2d.SPEC.algorithms
    products = True
    indexed = True

    def reference(self, op: ConvMaxPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        made = conv2d.SPEC.reference(op.conv, inputs, weights)
        return maxpool2d.SPEC.reference(op.pool, (made,), ())

    def pytorch(self, op: ConvMaxPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        made = conv2d.SPEC.pytorch(op.conv, inputs, weights)
        return maxpool2d.SPEC.pytorch(op.pool, (made,), ())

    def depth(self, op: ConvMaxPool) -> int:
        return op.conv.depth

    # -- problems ------------------------------------------------------------------------------

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most, macs, Stems.of(kernel))

    def corners(self) -> Iterator[Problem]:
        stem, overlap = MaxPool2d((3, 3), (2, 2), (1, 1)), MaxPool2d((3, 3), (1, 1), (1, 1))
        seven = (7, 7), (2, 2), (3, 3)
        # A ResNet's stem. Rows and columns of the convolution are even, odd, fewer than a window;
        # channels as many as a kernel may require, and as few as possible.
        for n, o, bias, relu, h, w in (
            (1, 64, True, True, 13, 18),
            (2, 64, True, True, 8, 5),
            (2, 64, True, True, 1, 4),
            (2, 5, True, False, 15, 20),
            (2, 8, False, False, 22, 9),
            (1, 1, False, True, 2, 1),
        ):
            yield _joined(Conv2d(3, o, *seven, bias, False, relu), stem, (n, 3, h, w))
        # So tall that a block computes more rows than a ring of lines holds; as wide as two blocks
        # and a bit, or exactly one, with padding of the pooling on one axis only.
        small = Conv2d(1, 2, *seven, bias=True)
        yield _joined(small, stem, (1, 1, TALL, 5))
        for padding, w in (
            ((1, 1), 523),
            ((1, 0), 523),
            ((0, 1), 523),
            ((1, 0), 224),
            ((0, 1), 224),
        ):
            yield _joined(small, MaxPool2d((3, 3), (2, 2), padding), (1, 1, 9, w))
        # Windows of even width, and of as many columns as some kernels take.
        for window, ahead in (((4, 4), (1, 1)), ((3, 8), (1, 3)), ((5, 2), (2, 0))):
            conv = Conv2d(3, 8, window, (2, 2), ahead, bias=True, relu=True)
            yield _joined(conv, stem, (2, 3, 12, 18))
        # One column wider than such a kernel takes.
        wide = Conv2d(3, 8, (3, 9), (2, 2), (1, 4), bias=True, relu=True)
        yield _joined(wide, stem, (2, 3, 12, 18))
        # Every pair differs, in both windows.
        conv = Conv2d(2, 3, (3, 5), (2, 1), (1, 3), bias=True)
        yield _joined(conv, MaxPool2d((2, 3), (3, 2), (1, 0)), (2, 2, 11, 9))
        conv = Conv2d(3, 2, (5, 2), (1, 2), (0, 1), bias=True, relu=True)
        yield _joined(conv, MaxPool2d((5, 4), (2, 3), (1, 2)), (1, 3, 13, 14))
        # The pooling pads where the convolution does not, and where it sees only its own padding.
        yield _joined(Conv2d(2, 3, (3, 3)), overlap, (2, 2, 5, 6))
        padded = Conv2d(2, 3, (2, 3), (1, 1), (2, 3), bias=True)
        yield _joined(padded, overlap, (2, 2, 2, 3))
        # Windows with gaps, so that some outputs of the convolution are not needed; one output; no
        # pooling.
        apart = MaxPool2d((1, 2), (4, 5))
        yield _joined(Conv2d(3, 2, (3, 3), padding=(1, 1)), apart, (2, 3, 9, 12))
        whole = MaxPool2d((3, 4), (1, 1))
        yield _joined(Conv2d(3, 2, (3, 2), bias=True), whole, (3, 3, 5, 5))
        yield _joined(Conv2d(3, 4, (1, 1)), MaxPool2d((1, 1), (1, 1)), (2, 3, 3, 5))

    def vast(self) -> Iterator[Problem]:
        yield from super().vast()
        # The tensors are small enough, and the image with its padding, or the weights, are not.
        stem = MaxPool2d((3, 3), (2, 2), (1, 1))
        few = Conv2d(1, 2, (7, 7), (2, 2), (3, 3), bias=True)
        yield _joined(few, stem, (1, 1, BEYOND_INDEX // 2, 1))
        yield _joined(replace(few, out_channels=2**25), stem, (1, 1, 7, 7))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        """Crossings on the pooled output's axes first, then on the convolution's."""
        of_conv, of_pool = Stems.of(kernel).windows[0]
        pool = MaxPool2d(*square(of_pool))
        for pooled in (True, False):
            for n, c, o, *made in along(size, 2, 3, 2, 4, 3, full=(2, 4)):
                conv = Conv2d(c, o, *square(of_conv), bias=True)
                k, s, p = of_pool
                if pooled:
                    made = [max(1, (extent - 1) * s + k - 2 * p) for extent in made]
                made = [max(extent, k - 2 * p) for extent in made]
                k, s, p = of_conv
                h, w = (max(1, (extent - 1) * s + k - 2 * p) for extent in made)
                yield _joined(conv, pool, (n, c, h, w))

    def room(self, kernel: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        return Stems.of(kernel).room(max_elements, max_macs)

    def room_of_choice(self, choice: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        """Few problems of a tile are small: images fill a row of it."""
        return 2 * max_elements, 4 * max_macs

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        return near(problem)

    def numbers(self, problem: Problem) -> Numbers:
        op = problem.op
        assert isinstance(op, ConvMaxPool)
        shape = dict(zip("nchw", problem.inputs[0], strict=True))
        pool = {f"pool_{name}": n for name, n in numbers_of(op.pool).items()}
        of_conv = numbers_of(op.conv) | channels_of(op.conv) | flags_of(op.conv)
        return shape | pool | of_conv

    def rebuild(self, op: ConvMaxPool, numbers: Numbers) -> Problem:
        conv = conv2d.SPEC.rebuild(op.conv, numbers)
        assert isinstance(conv.op, Conv2d)
        return _joined(conv.op, MaxPool2d(*window_of(numbers, "pool_")), conv.inputs[0])

    # -- inputs --------------------------------------------------------------------------------

    def variants(self, kind: str) -> int:
        return 2 if kind in ("exact", "edges") else 1

    def exact_inputs(
        self, op: ConvMaxPool, inputs: list[Array], weights: list[Array], rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays]:
        """Exact inputs with negative sums in every second variant, so that a padding of 0 would
        win.

        No sum is above zero and, with a negative bias, no output is. Where a ReLU would then hide
        everything, a positive bias lifts some above zero. Products add up to at most half of the
        exact range, and the bias is no larger.
        """
        x, weight = inputs[0], weights[0]
        if variant % 2 == 0:
            return tuple(inputs), tuple(weights)
        if op.conv.relu and not op.conv.bias:
            return (x,), (weight,)
        size = np.abs(x).mean() * np.abs(weight).sum(axis=(1, 2, 3))
        bias = np.rint(size * rng.random(size.shape)) * (1 if op.conv.relu else -1)
        return (-np.abs(x),), (np.abs(weight), *([bias] if op.conv.bias else []))

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        op = problem.op
        assert isinstance(op, ConvMaxPool)
        conv, pool = parts_of(problem)
        n, o, i, j = pick(rng, problem.output)
        r, s = pick(rng, op.pool.kernel_size)
        place = pixel(op.pool, pool.inputs[0], (i, j), (r, s))
        return meeting_in(op.conv, conv.inputs[0], (n, o, *place), rng)

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        return conv2d.SPEC.cancelling(inputs, weights)

    def only_edges(
        self, op: ConvMaxPool, inputs: Arrays, weights: Arrays, rng: Rng, variant: int, tiny: float
    ) -> tuple[Arrays, Arrays] | None:
        """Little else than −Inf, in every second variant without a ReLU."""
        if op.conv.relu or variant % 2 == 0:
            return None
        flat = inputs[0].reshape(-1)
        flat[rng.random(flat.size) < rng.choice([0.5, 1.0])] = -np.inf
        return inputs, (np.abs(weights[0]) + tiny, *weights[1:])


def _joined(conv: Conv2d, pool: MaxPool2d, shape: Shape) -> Problem:
    return Problem(ConvMaxPool(conv, pool), (shape,))


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int, macs: int, stems: Stems) -> Problem:
    """All windows of both, but mostly those that the kernel takes if it takes few; half of the
    draws have few channels.

    Every second draw is at an edge in the pooled extents, the others in the convolution's.
    """
    if draw(st.integers(0, 1 if stems.every_window else 7)):
        of_conv, of_pool = draw(st.sampled_from(stems.windows))
        plain, pool = Conv2d(1, 1, *square(of_conv)), MaxPool2d(*square(of_pool))
    else:
        kernel = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
        stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
        plain, pool = Conv2d(1, 1, kernel, stride, padding), draw(maxpool2d.pools(largest=4))
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
    drawn = draw(extents(axes, limits))
    made = (drawn["h"], drawn["w"])
    if pooled:
        made = draw(source(made, pool.kernel_size, pool.stride, pool.padding))
    else:  # the convolution's own extents, large enough for a window
        (kh, kw), (ph, pw) = pool.kernel_size, pool.padding
        made = max(made[0], kh - 2 * ph), max(made[1], kw - 2 * pw)
    image = draw(source(made, plain.kernel_size, plain.stride, plain.padding))
    bias, relu = draw(st.sampled_from([(b, r) for b, residual, r in EPILOGUES if not residual]))
    conv = replace(plain, in_channels=drawn["c"], out_channels=drawn["o"], bias=bias, relu=relu)
    shape = (drawn["n"], drawn["c"], *image)
    assume(math.prod(shape) <= 4 * most and math.prod(conv.infer(shape)) <= 4 * most)
    return Problem(ConvMaxPool(conv, pool), (shape,))


SPEC = ConvMaxPoolSpec()
