"""A quantised convolution and the max-pooling of its integers, as one op.

Its image is in integers, or in pixels or numbers that it makes integers of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Array, Kernel
from r18.errors import ShapeError
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem
from r18.graph.quantized import (
    PIXELS,
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizePixels,
)
from r18_oracle.ops.integers import qconv2d, quantize
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.requantize import explained, requantized
from r18_oracle.ops.integers.spec import BITS, IMAGES, QuantizedSpec, asked
from r18_oracle.ops.normalize import normalization
from r18_oracle.ops.pairs import conv2d_maxpool2d
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors

LARGE = (
    (89, 1, 41, 1),  # two strips of six turns at most per image: three would be another wave
    (1, 1, 9, 523),  # several tiles along a row, the last one partial
    (1, 1, 9, 224),  # one tile that is full
)
"""Images whose blocks take more turns than a ring has stages, or that are as wide as some blocks.

`conv2d_maxpool2d` has such corners with two output channels, which a kernel for multiples of 16
refuses; with 16, an image of `conv2d.TALL` rows is too many products for brief profiles.
"""


class QuantizedConvMaxPoolSpec(QuantizedSpec[QuantizedConvMaxPool]):
    op = QuantizedConvMaxPool
    inner = conv2d_maxpool2d.SPEC
    chosen = ("signed", "narrow", "image")

    def part(self, op: QuantizedConvMaxPool) -> ConvMaxPool:
        return ConvMaxPool(op.conv.conv, op.pool)

    def settings(self, op: QuantizedConvMaxPool) -> Numbers:
        own = qconv2d.SPEC.settings(op.conv)
        if op.image is None:
            return own | {"image": IMAGES.index("int8")}
        return own | {"image": IMAGES.index("pixels" if op.of_pixels else "numbers")}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        op = problem.op
        assert isinstance(op, ConvMaxPool)
        kind = IMAGES[settings.get("image", 0)]
        signed = {} if kind == "int8" else {"signed": 1}
        conv = qconv2d.SPEC.quantized(Problem(op.conv, problem.inputs), settings | signed).op
        assert isinstance(conv, QuantizedConv2d)
        image: Quantize | QuantizePixels | None = None
        if kind == "pixels":
            image = QuantizePixels(normalization(op.conv.in_channels))
        elif kind == "numbers":
            image = Quantize()
        return Problem(QuantizedConvMaxPool(conv, op.pool, image), problem.inputs)

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return super().draw(asked(kernel, self._forms), most, macs)

    def corners(self) -> Iterator[Problem]:
        yield from super().corners()
        for problem, bits in zip(self.inner.corners(), cycle(BITS), strict=False):
            for image in range(1, len(IMAGES)):
                settings = {"signed": 1, "narrow": BITS.index(bits), "image": image}
                with suppress(ShapeError):  # more products than a sum holds
                    yield self.quantized(problem, settings)
        yield from self._large()

    def vast(self) -> Iterator[Problem]:
        """Vast problems of int8 images, the only ones that kernels of few channels take."""
        for problem in self.inner.vast():
            yield self.quantized(problem, {"signed": 1, "narrow": 0})

    def _large(self) -> Iterator[Problem]:
        """A ResNet's stem on `LARGE` images of int8, of pixels and of numbers."""
        conv = Conv2d(1, 16, (7, 7), (2, 2), (3, 3), bias=True, relu=True)
        op = ConvMaxPool(conv, MaxPool2d((3, 3), (2, 2), (1, 1)))
        for image in range(len(IMAGES)):
            for shape in LARGE:
                settings = {"signed": 1, "narrow": 0, "image": image}
                yield self.quantized(Problem(op, (shape,)), settings)

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        yield from super().crossings(asked(kernel, self._forms), size)

    def room(self, kernel: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        return self.inner.room(asked(kernel, self._forms), max_elements, max_macs)

    def room_of_choice(self, choice: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        return self.inner.room_of_choice(asked(choice, self._forms), max_elements, max_macs)

    def _forms(self, problem: Problem) -> Iterator[Problem]:
        """The inner problem, of each of `IMAGES`."""
        for image in range(len(IMAGES)):
            yield self.quantized(problem, {"signed": 1, "narrow": 0, "image": image})

    # -- what it computes ----------------------------------------------------------------------

    def reference(
        self, op: QuantizedConvMaxPool, inputs: Tensors, weights: Tensors
    ) -> torch.Tensor:
        return _pooled(op, requantized(self._sums(op, inputs, weights)))

    def explain(
        self, op: QuantizedConvMaxPool, inputs: Tensors, weights: Tensors, got: Array
    ) -> str:
        return explained(self._sums(op, inputs, weights), got, lambda made: _pooled(op, made))

    def _sums(self, op: QuantizedConvMaxPool, inputs: Tensors, weights: Tensors) -> Any:
        """The sums of the convolution, before its max-pooling."""
        if op.image is not None:
            *weights_of_conv, last = weights
            image = (
                quantize.PIXELS_SPEC.reference(op.image, inputs, (last,))
                if isinstance(op.image, QuantizePixels)
                else quantize.SPEC.reference(op.image, inputs, (last,))
            )
            inputs, weights = (image,), tuple(weights_of_conv)
        return qconv2d.SPEC.sums(op.conv, inputs, weights)

    # -- inputs --------------------------------------------------------------------------------

    def variants(self, kind: str) -> int:
        return qconv2d.SPEC.variants(kind)

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """The convolution's inputs and weights, with an image that quantises to its integers."""
        op = problem.op
        assert isinstance(op, QuantizedConvMaxPool)
        if kind == "impulse":
            x, weight = integers.impulse(self, problem, rng, variant)
            channels = (op.conv.conv.out_channels,)
            found: tuple[Arrays, Arrays] | None
            found = (x,), (weight, np.zeros(channels), np.ones(channels))
        else:
            found = qconv2d.SPEC.given(Problem(op.conv, problem.inputs), kind, rng, variant)
        if found is None or op.image is None:
            return found
        (x,), weights = found
        image, last = _pixels(x, rng) if op.of_pixels else _numbers(x, rng, kind)
        return (image,), (*weights, last)


def _pixels(x: Array, rng: Rng) -> tuple[Array, Array]:
    """Pixels and a table that make these integers, (N, C, H, W).

    The table has every integer once for each channel, in random order.
    """
    pixels = np.array([rng.permutation(PIXELS) for _ in range(x.shape[1])])
    table = np.empty(pixels.shape)
    np.put_along_axis(table, pixels, np.arange(-128.0, 128.0)[None], axis=1)
    of_channel = np.arange(len(pixels))[:, None, None]
    return pixels[of_channel, x.astype(int) + 128].astype(np.float64), table


def _numbers(x: Array, rng: Rng, kind: str) -> tuple[Array, Array]:
    """Numbers and a scale that make these integers, (N, C, H, W).

    Impulses are these integers exactly. Edges whose scale is a power of two are ties where the
    integer is even, and almost ties where it is odd. With another scale they are ties but for the
    last bit, so the integer may differ by one. Half of the numbers at the ends lie far beyond them.
    """
    if kind == "impulse":
        return x / 64, np.array([1 / 64])
    scale = float(np.float32(rng.uniform(0.01, 0.05)))
    offset = rng.uniform(-0.45, 0.45, x.shape)
    if kind == "edges":
        offset = rng.choice([-0.5, 0.5], x.shape)
        if rng.integers(2):
            scale = float(np.exp2(rng.integers(-6, 1)))
            offset *= np.where(x % 2 == 0, 1, 0.998)
    beyond = np.where(rng.random(x.shape) < 0.5, 1.0, np.exp2(rng.uniform(0, 60, x.shape)))
    units = np.where((x == 127) | (x == -128), x * beyond, x + offset)
    return units * scale, np.array([scale])


def _pooled(op: QuantizedConvMaxPool, made: torch.Tensor) -> torch.Tensor:
    pool = op.pool
    return F.max_pool2d(made, pool.kernel_size, pool.stride, pool.padding)


SPEC = QuantizedConvMaxPoolSpec()
