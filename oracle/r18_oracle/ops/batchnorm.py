"""BatchNorm at inference: (x − mean) / √(var + eps) · weight + bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.backend import Kernel
from r18.graph.ops import BatchNorm, Problem
from r18_oracle.generate.sizes import BEYOND_GRID, Sizes, along_images, images
from r18_oracle.ops.spec import Arrays, Draw, Numbers, OpSpec, Rng, Tensors, pick, shape_of


class BatchNormSpec(OpSpec[BatchNorm]):
    op = BatchNorm
    algorithms = ("batchnorm", "scale_shift")

    def reference(self, op: BatchNorm, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        weight, bias, mean, var = (w[:, None, None] for w in weights)
        return (inputs[0] - mean) / torch.sqrt(var + op.eps) * weight + bias

    def pytorch(self, op: BatchNorm, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        weight, bias, mean, var = weights
        return F.batch_norm(inputs[0], mean, var, weight, bias, eps=op.eps)

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        yield Problem(BatchNorm(3), ((2, 3, 5, 7),))
        yield Problem(BatchNorm(65, 1e-3), ((1, 65, 1, 1),))

    def many(self) -> Iterator[Problem]:
        yield Problem(BatchNorm(BEYOND_GRID), ((1, BEYOND_GRID, 1, 1),))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_images(size):
            yield Problem(BatchNorm(shape[1]), (shape,))

    def rebuild(self, op: BatchNorm, numbers: Numbers) -> Problem:
        return Problem(replace(op, channels=numbers["c"]), (shape_of(numbers),))

    def weights(self, problem: Problem, rng: Rng, draw: Draw, scale: float) -> Arrays:
        """Scale around 1, some of them negative; shift and mean normal; variance up to 3."""
        channels = problem.inputs[0][1]
        return (
            rng.uniform(0.5, 1.5, channels) * rng.choice([-1.0, 1.0], channels, p=[0.2, 0.8]),
            rng.standard_normal(channels),
            rng.standard_normal(channels),
            rng.uniform(0.1, 3.0, channels),
        )

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        scale, shift, _, var = weights
        return (inputs[0] + 100.0,), (scale, shift, np.full_like(scale, 100.0), var)

    def edge_weights(self, weights: Arrays, rng: Rng) -> None:
        """A variance of 0, and one below −eps, whose channel is NaN."""
        below = pick(rng, weights[3].shape)
        if len(weights[3]) > 1:
            weights[3][below] = -1.0
        weights[3][pick(rng, weights[3].shape)] = 0.0


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    shape = draw(images(sizes, most))
    return Problem(BatchNorm(shape[1], draw(st.sampled_from([1e-5, 1e-3, 0.1]))), (shape,))


SPEC = BatchNormSpec()
