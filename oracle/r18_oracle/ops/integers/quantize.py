"""Numbers into int8, and pixels into int8 by a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.graph.ops import Normalize, Problem
from r18.graph.quantized import Quantize, QuantizePixels
from r18_oracle.ops import normalize, relu
from r18_oracle.ops.integers.requantize import saturated
from r18_oracle.ops.spec import Arrays, Numbers, OpSpec, Rng, Tensors


class QuantizeSpec(OpSpec[Quantize]):
    op = Quantize
    algorithms = ("integer",)
    indexed = True

    def reference(self, op: Quantize, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return saturated(torch.round(inputs[0].float() / weights[0].float()), "int8")

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return relu.SPEC.draw(kernel, most, macs).map(_quantizing)

    def corners(self) -> Iterator[Problem]:
        yield from map(_quantizing, relu.SPEC.corners())

    def many(self) -> Iterator[Problem]:
        yield from map(_quantizing, relu.SPEC.many())

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        yield from map(_quantizing, relu.SPEC.crossings(kernel, size))

    def exact(self, problem: Problem, algorithm: str) -> bool:
        return False

    def variants(self, kind: str) -> int:
        return 2 if kind == "edges" else 1

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """Scales like those of images. Edges are ties: multiples of half a scale, exact where it is
        a power of two, and else to the last bit."""
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
            scale = float(np.exp2(rng.integers(-6, 1))) if variant % 2 else scale
            x = rng.integers(-150, 150, shape) * float(np.float32(scale)) + np.float32(scale) / 2
            flat = x.reshape(-1)
            for value in (np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38)[: max(1, flat.size // 8)]:
                flat[rng.integers(flat.size)] = value
        return (x,), (np.array([scale], np.float32).astype(np.float64),)


def _quantizing(problem: Problem) -> Problem:
    return Problem(Quantize(), problem.inputs)


class QuantizePixelsSpec(OpSpec[QuantizePixels]):
    op = QuantizePixels
    algorithms = ("integer",)
    indexed = True

    def reference(self, op: QuantizePixels, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        image, table = inputs[0].long(), weights[0]
        channels = torch.arange(op.normalize.channels)[:, None, None]
        return table[channels, image]

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return normalize.SPEC.draw(kernel, most, macs).map(_tabled)

    def corners(self) -> Iterator[Problem]:
        yield from map(_tabled, normalize.SPEC.corners())

    def many(self) -> Iterator[Problem]:
        yield from map(_tabled, normalize.SPEC.many())

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        yield from map(_tabled, normalize.SPEC.crossings(kernel, size))

    def rebuild(self, op: QuantizePixels, numbers: Numbers) -> Problem:
        return _tabled(normalize.SPEC.rebuild(op.normalize, numbers))

    def exact(self, problem: Problem, algorithm: str) -> bool:
        return False

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """Any table: what it was made of is no business of a kernel."""
        op, shape = problem.op, problem.inputs[0]
        assert isinstance(op, QuantizePixels)
        table = rng.integers(-128, 128, op.weights()[0].shape).astype(np.float64)
        draw: Callable[..., Array] = normalize.PIXELS.get(kind, normalize.PIXELS["edges"])
        return (draw(op.normalize, shape, rng),), (table,)


def _tabled(problem: Problem) -> Problem:
    assert isinstance(problem.op, Normalize)
    return Problem(QuantizePixels(problem.op), problem.inputs)


PIXELS_SPEC = QuantizePixelsSpec()
SPEC = QuantizeSpec()
__all__ = ["PIXELS_SPEC", "SPEC"]
