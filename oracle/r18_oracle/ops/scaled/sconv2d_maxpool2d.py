"""A scaled convolution and the max-pooling of its numbers, as one op.

Its image is in e4m3, or in float32, which it rounds to e4m3.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Array, Kernel
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem
from r18.graph.precision import round_to_e4m3
from r18.graph.scaled import Scale, ScaledConv2d, ScaledConvMaxPool
from r18_oracle.generate.sizes import takes
from r18_oracle.ops.integers.qconv2d_maxpool2d import LARGE
from r18_oracle.ops.integers.spec import asked
from r18_oracle.ops.pairs import conv2d_maxpool2d
from r18_oracle.ops.scaled import sconv2d
from r18_oracle.ops.scaled.spec import ScaledSpec, powers
from r18_oracle.ops.spec import Arrays, Draw, Numbers, Rng, Tensors

IMAGES = ("e4m3", "float32")
"""The format of an image, by the number `image`."""


class ScaledConvMaxPoolSpec(ScaledSpec[ScaledConvMaxPool]):
    op = ScaledConvMaxPool
    inner = conv2d_maxpool2d.SPEC
    products = True
    chosen = ("scaled",)

    def part(self, op: ScaledConvMaxPool) -> ConvMaxPool:
        return ConvMaxPool(op.conv.conv, op.pool)

    def settings(self, op: ScaledConvMaxPool) -> Numbers:
        return {"scaled": int(op.image is not None)}

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        op = problem.op
        assert isinstance(op, ConvMaxPool)
        conv = sconv2d.SPEC.quantized(Problem(op.conv, problem.inputs), {}).op
        assert isinstance(conv, ScaledConv2d)
        image = Scale() if settings.get("scaled", 0) else None
        return Problem(ScaledConvMaxPool(conv, op.pool, image), problem.inputs)

    def depth(self, op: ScaledConvMaxPool) -> int:
        return op.conv.conv.depth

    # -- problems ------------------------------------------------------------------------------

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return super().draw(asked(kernel, self._forms), most, macs)

    def corners(self) -> Iterator[Problem]:
        """The corners of the float op, and a ResNet's stem on `LARGE` images; in e4m3 and in
        float32."""
        conv = Conv2d(1, 16, (7, 7), (2, 2), (3, 3), bias=True, relu=True)
        stem = ConvMaxPool(conv, MaxPool2d((3, 3), (2, 2), (1, 1)))
        for image in range(len(IMAGES)):
            for problem in self.inner.corners():
                yield self.quantized(problem, {"scaled": image})
            for shape in LARGE:
                yield self.quantized(Problem(stem, (shape,)), {"scaled": image})

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        """Crossings with e4m3 and float32 images in turn, where the kernel takes either."""
        every = self.inner.crossings(asked(kernel, self._forms), size)
        for problem, turn in zip(every, cycle(range(len(IMAGES))), strict=False):
            forms = tuple(self._forms(problem))
            both = all(takes(kernel, form) for form in forms)
            yield from forms[turn : turn + 1] if both else forms

    def room(self, kernel: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        return self.inner.room(asked(kernel, self._forms), max_elements, max_macs)

    def room_of_choice(self, choice: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        return self.inner.room_of_choice(asked(choice, self._forms), max_elements, max_macs)

    def _forms(self, problem: Problem) -> Iterator[Problem]:
        """The inner problem, of each of `IMAGES`."""
        for image in range(len(IMAGES)):
            yield self.quantized(problem, {"scaled": image})

    # -- what it computes ----------------------------------------------------------------------

    def reference(self, op: ScaledConvMaxPool, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        image = inputs[0]
        if op.image is not None:
            image = torch.from_numpy(image_of(image.numpy(), weights[-1].numpy()))
        made = sconv2d.SPEC.reference(op.conv, (image,), weights[:3])
        pool = op.pool
        return F.max_pool2d(made, pool.kernel_size, pool.stride, pool.padding)

    # -- inputs --------------------------------------------------------------------------------

    def variants(self, kind: str) -> int:
        return self.inner.variants(kind)

    def weights(self, problem: Problem, rng: Rng, draw: Draw, scale: float) -> Arrays:
        """The convolution's weights, and a scale with which most numbers are in e4m3's range."""
        op = problem.op
        assert isinstance(op, ScaledConvMaxPool)
        found = sconv2d.SPEC.weights(Problem(op.conv, problem.inputs), rng, draw, scale)
        if op.image is None:
            return found
        return (*found, np.exp2(rng.uniform(-8, -2, (1,))))

    def exact_inputs(
        self,
        op: ScaledConvMaxPool,
        inputs: list[Array],
        weights: list[Array],
        rng: Rng,
        variant: int,
    ) -> tuple[Arrays, Arrays]:
        """The float op's inputs: negative sums in every second variant. Factors are powers of 2."""
        weight, bias, multiplier, *scale = weights
        part = self.part(op)
        (x,), (weight, bias) = self.inner.exact_inputs(part, inputs, [weight, bias], rng, variant)
        factors = [powers(rng, one.shape) for one in (multiplier, *scale)]
        return (x * factors[1] if scale else x,), (weight, bias, *factors)

    def only_edges(
        self,
        op: ScaledConvMaxPool,
        inputs: Arrays,
        weights: Arrays,
        rng: Rng,
        variant: int,
        tiny: float,
    ) -> tuple[Arrays, Arrays] | None:
        """NaN in a column, in every row or in every second or fourth one, in every second variant.

        The weights' padding makes NaN of outputs whose windows hold none, so a kernel may note
        where it has read one. Windows must be found whose NaN stand in some of its lines only.
        """
        if variant % 2 == 0:
            return None
        step = rng.choice([1, 2, 4])
        image = inputs[0]
        image[:, :, rng.integers(step) :: step, rng.integers(image.shape[3])] = np.nan
        return inputs, weights

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """Impulses of the convolution, in units of a scale if the image is scaled."""
        if kind != "impulse":
            return None
        pixels, weight, *more = sconv2d.impulse(self, problem, rng, variant)
        op = problem.op
        assert isinstance(op, ScaledConvMaxPool)
        if op.image is None:
            return (pixels,), (weight, *more)
        return (pixels / 64,), (weight, *more[:-1], np.array([1 / 64]))


def image_of(x: Array, scale: Array) -> Array:
    """The e4m3 numbers of an image, in float64."""
    return round_to_e4m3(x / scale)


SPEC = ScaledConvMaxPoolSpec()
