"""Numbers into int8, and pixels into int8 by a table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Normalize, Problem, ReLU
from r18.graph.quantized import Quantize, QuantizePixels
from r18_oracle.ops import normalize, relu
from r18_oracle.ops.integers.requantize import saturated
from r18_oracle.ops.integers.spec import QuantizedSpec
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors

EDGES = ("near_ties", "ties")
"""Variants of edges: odd multiples of half a scale, ties to the last bit; with a power of two for a
scale, ties."""


class QuantizeSpec(QuantizedSpec[Quantize]):
    """The spec of `Quantize`, with the problems of a ReLU: any shape."""

    op = Quantize
    inner = relu.SPEC

    def part(self, op: Quantize) -> ReLU:
        return ReLU()

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        return Problem(Quantize(), problem.inputs)

    def reference(self, op: Quantize, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return saturated(torch.round(inputs[0].float() / weights[0].float()), "int8")

    def variants(self, kind: str) -> int:
        return len(EDGES) if kind == "edges" else 1

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """Scales like those of images."""
        shape = problem.inputs[0]
        scale = float(rng.uniform(0.01, 0.05))
        x: Array = rng.standard_normal(shape)
        if kind == "impulse":
            x, scale = (np.arange(x.size).reshape(shape) % 125 + 1.0) / 64, 1 / 64
        elif kind == "positive":
            x = np.abs(x) * 3
        elif kind == "cancelling":
            x *= scale
        elif kind == "wide":
            x *= np.exp2(rng.uniform(-30, 30, shape))
        elif kind == "edges":
            if EDGES[variant % len(EDGES)] == "ties":
                scale = float(np.exp2(rng.integers(-6, 1)))
            x = rng.integers(-150, 150, shape) * float(np.float32(scale)) + np.float32(scale) / 2
            flat = x.reshape(-1)
            for value in (np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38)[: max(1, flat.size // 8)]:
                flat[rng.integers(flat.size)] = value
        return (x,), (np.array([scale], np.float32).astype(np.float64),)


class QuantizePixelsSpec(QuantizedSpec[QuantizePixels]):
    op = QuantizePixels
    inner = normalize.SPEC

    def part(self, op: QuantizePixels) -> Normalize:
        return op.normalize

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        assert isinstance(problem.op, Normalize)
        return Problem(QuantizePixels(problem.op), problem.inputs)

    def reference(self, op: QuantizePixels, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        image, table = inputs[0].long(), weights[0]
        channels = torch.arange(op.normalize.channels)[:, None, None]
        return table[channels, image]

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """Pixels and any table: a kernel does not depend on the source of the table."""
        op, shape = problem.op, problem.inputs[0]
        assert isinstance(op, QuantizePixels)
        table = rng.integers(-128, 128, op.weights()[0].shape).astype(np.float64)
        draw: Callable[..., Array] = normalize.PIXELS.get(kind, normalize.PIXELS["edges"])
        return (draw(op.normalize, shape, rng),), (table,)


PIXELS_SPEC = QuantizePixelsSpec()
SPEC = QuantizeSpec()
__all__ = ["PIXELS_SPEC", "SPEC"]
