"""Normalize: bytes into network inputs, (x / 255 − mean) / std by channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.graph.ops import Normalize, Problem, Shape
from r18.images.preprocess import Preprocess
from r18_oracle.generate.sizes import BEYOND_GRID, Sizes, along_images, images
from r18_oracle.ops.spec import Arrays, Numbers, OpSpec, Rng, Tensors, shape_of


class NormalizeSpec(OpSpec[Normalize]):
    op = Normalize
    algorithms = ("normalize",)
    indexed = True

    def reference(self, op: Normalize, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        mean, std = (
            torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (op.mean, op.std)
        )
        return (inputs[0] / 255 - mean) / std

    def pytorch(self, op: Normalize, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        mean, std = (torch.tensor(values)[:, None, None] for values in (op.mean, op.std))
        return (inputs[0] / 255 - mean) / std

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        # Rows that are no multiple of four bytes; planes of whole vectors and others; images of one
        # pixel; RGB, grey, a fourth channel, and more channels than a vector holds.
        for shape in ((2, 3, 5, 7), (3, 3, 4, 6), (2, 3, 8, 8), (2, 3, 1, 1)):
            yield Problem(normalization(3), (shape,))
        for shape in ((2, 1, 6, 5), (3, 4, 3, 4), (2, 17, 3, 2)):
            yield Problem(normalization(shape[1]), (shape,))
        # A mean far outside the pixels, and a deviation far from one.
        yield Problem(Normalize((-3.0, 100.0, 0.0), (1e-3, 1e3, 1.0)), ((2, 3, 4, 5),))

    def many(self) -> Iterator[Problem]:
        yield Problem(normalization(BEYOND_GRID), ((1, BEYOND_GRID, 1, 1),))
        yield Problem(normalization(1), ((BEYOND_GRID, 1, 1, 1),))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_images(size):
            yield Problem(normalization(shape[1]), (shape,))

    def rebuild(self, op: Normalize, numbers: Numbers) -> Problem:
        channels = numbers["c"]
        return Problem(Normalize(op.mean[:channels], op.std[:channels]), (shape_of(numbers),))

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        assert isinstance(problem.op, Normalize)
        if kind not in PIXELS:
            return None
        return (PIXELS[kind](problem.op, problem.inputs[0], rng),), ()


@cache  # every call of `corners` needs one of `BEYOND_GRID` channels, with 131,074 numbers
def normalization(channels: int) -> Normalize:
    """Means and deviations like those of photographs, different for each channel; ImageNet's for
    three channels."""
    if channels == 3:
        return Preprocess().normalize
    mean = tuple(0.5 - k % 97 / 250 for k in range(channels))
    return Normalize(mean, tuple(0.2 + k % 89 / 300 for k in range(channels)))


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    """Half of the draws are RGB, the case that kernels are written for."""
    n, c, h, w = draw(images(sizes, most // 3))
    c = 3 if draw(st.booleans()) else c
    return Problem(normalization(c), ((n, c, h, w),))


def _near_the_mean(op: Normalize, shape: Shape, rng: Rng) -> Array:
    """Bytes close to the mean, which cancel when it is subtracted."""
    mean = np.rint(np.array(op.mean) * 255)[:, None, None]
    return np.asarray(np.clip(mean + rng.integers(-2, 3, shape), 0, 255))


PIXELS: dict[str, Callable[[Normalize, Shape, Rng], Array]] = {
    "normal": lambda op, shape, rng: rng.integers(0, 256, shape),
    "positive": lambda op, shape, rng: rng.integers(128, 256, shape),
    "cancelling": _near_the_mean,
    "wide": lambda op, shape, rng: rng.choice([0, 1, 2, 127, 128, 254, 255], shape),
    "edges": lambda op, shape, rng: (np.arange(math.prod(shape)).reshape(shape) + 255) % 256,
}
"""The kinds of input as bytes: any; those that a signed byte cannot hold; those near the mean; both
ends and the middle; every byte in turn, the largest first. No byte is NaN or infinite."""

SPEC = NormalizeSpec()
