"""Max-pooling over windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Array, Kernel
from r18.graph.ops import MaxPool2d, Problem
from r18_oracle.generate.sizes import BEYOND_GRID, Sizes, along_images, images
from r18_oracle.ops.spec import Arrays, Numbers, OpSpec, Rng, Tensors, shape_of
from r18_oracle.ops.window import numbers_of, window_of


class MaxPool2dSpec(OpSpec[MaxPool2d]):
    op = MaxPool2d
    algorithms = ("exact",)
    indexed = True

    def reference(self, op: MaxPool2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return F.max_pool2d(inputs[0], op.kernel_size, op.stride, op.padding)

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        yield Problem(MaxPool2d((5, 3), (2, 3), (2, 1)), ((2, 3, 11, 7),))
        yield Problem(MaxPool2d((3, 5), (3, 2), (1, 2)), ((3, 2, 8, 13),))
        yield Problem(MaxPool2d((4, 4), (3, 3), (2, 2)), ((1, 2, 9, 10),))
        yield Problem(MaxPool2d((1, 2), (4, 5)), ((2, 2, 9, 12),))  # pixels never read
        yield Problem(MaxPool2d((3, 3), (2, 2), (1, 1)), ((2, 3, 1, 2),))
        yield Problem(MaxPool2d((5, 5), (1, 1), (2, 2)), ((2, 3, 3, 3),))
        yield Problem(MaxPool2d((5, 7), (1, 1)), ((2, 3, 5, 7),))
        # Wider than the images of the network; a batch that is no multiple of 64.
        yield Problem(MaxPool2d((1, 3), (1, 1), (0, 1)), ((1, 2, 1, 131),))
        yield Problem(MaxPool2d((2, 2), (1, 1), (1, 1)), ((67, 1, 1, 2),))

    def many(self) -> Iterator[Problem]:
        yield Problem(MaxPool2d((1, 1), (1, 1)), ((1, BEYOND_GRID, 1, 1),))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_images(size):
            yield Problem(MaxPool2d((2, 3), (1, 1), (1, 1)), (shape,))

    def numbers(self, problem: Problem) -> Numbers:
        assert isinstance(problem.op, MaxPool2d)
        return super().numbers(problem) | numbers_of(problem.op)

    def rebuild(self, op: MaxPool2d, numbers: Numbers) -> Problem:
        return Problem(MaxPool2d(*window_of(numbers)), (shape_of(numbers),))

    def exact_inputs(
        self, op: MaxPool2d, inputs: list[Array], weights: list[Array], rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays]:
        """Negative inputs, so that a padding of 0 would win."""
        return (-np.abs(inputs[0]) - 1,), ()

    def flood(self, flat: Array, rng: Rng) -> None:
        """So much −Inf that whole windows hold nothing else."""
        flat[rng.random(flat.size) < rng.choice([0.0, 0.5, 1.0])] = -np.inf


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    op = MaxPool2d((3, 3), (2, 2), (1, 1)) if draw(st.booleans()) else draw(pools())
    n, c, h, w = draw(images(sizes, most))
    h = max(h, op.kernel_size[0] - 2 * op.padding[0])
    w = max(w, op.kernel_size[1] - 2 * op.padding[1])
    return Problem(op, ((n, c, h, w),))


@st.composite
def pools(draw: st.DrawFn, largest: int = 5) -> MaxPool2d:
    """Any max-pooling with windows of at most `largest` rows and columns."""
    kernel = (draw(st.integers(1, largest)), draw(st.integers(1, largest)))
    stride = (draw(st.integers(1, largest + 1)), draw(st.integers(1, largest + 1)))
    padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
    return MaxPool2d(kernel, stride, padding)


SPEC = MaxPool2dSpec()
