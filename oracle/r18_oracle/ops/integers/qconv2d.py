"""Quantised convolution: sums of integers, requantised (`r18_oracle.ops.integers.requantize`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18.graph.quantized import LIMITS, MOST_DEPTH, QuantizedConv2d
from r18_oracle.generate.sizes import BEYOND_INDEX
from r18_oracle.ops import conv2d
from r18_oracle.ops.integers import spec as integers
from r18_oracle.ops.integers.requantize import (
    RANGES,
    SUBTLE,
    UNCONVERTED,
    VARIATIONS,
    Sums,
    explained,
    requantized,
)
from r18_oracle.ops.integers.spec import BITS, NUMBERS, QuantizedSpec, pairwise, stored
from r18_oracle.ops.spec import Arrays, Numbers, Rng, Tensors
from r18_oracle.threads import threads_for

EDGES = ("ties", "ends", "beyond_int32", "largest_sums", *SUBTLE)
"""Variants of edges: ties; both ends of every format, saturating; numbers far beyond int32; the
largest sums that int32 holds; a tie to the last bit for each variation of `SUBTLE`."""

CROSSED = Conv2d(3, 5, (3, 3), (1, 1), (1, 1), bias=True)
"""27 weights a channel: an odd number, so that packed ones end within a byte."""

NO_RESIDUAL = -1
RESIDUALS = (NO_RESIDUAL, *NUMBERS["signed_residual"])

SEVERAL_TILES = 640
"""Images such that each of the two large blocks that an H200 runs on each of its 132
multiprocessors has several tiles; `conv2d.MANY_TILES` are too many products for brief profiles."""

CANDIDATES = 64
"""Sums that are tried for a channel until one shows a variation: about half of them do."""
SEARCHED = 1024
"""Channels for which sums are tried: of 65,537, they took half of the time of a check."""


class QuantizedConv2dSpec(QuantizedSpec[QuantizedConv2d]):
    op = QuantizedConv2d
    inner = conv2d.SPEC
    chosen = ("signed", "signed_residual", "narrow")

    def part(self, op: QuantizedConv2d) -> Conv2d:
        return op.conv

    def settings(self, op: QuantizedConv2d) -> Numbers:
        signed = {"signed": int(op.stored[0] == "int8"), "narrow": BITS.index(op.bits)}
        if op.conv.residual:
            signed["signed_residual"] = int(op.stored[1] == "int8")
        return signed

    def quantized(self, problem: Problem, settings: Numbers) -> Problem:
        conv = problem.op
        assert isinstance(conv, Conv2d)
        formats = [stored(settings)]
        if conv.residual:
            formats.append(stored({"signed_residual": 0} | settings, "signed_residual"))
        op = QuantizedConv2d(replace(conv, bias=True), tuple(formats), BITS[settings["narrow"]])
        return Problem(op, problem.inputs)

    def corners(self) -> Iterator[Problem]:
        yield from super().corners()
        yield from self._crossed()

    def _crossed(self) -> Iterator[Problem]:
        """One small convolution: each two of its storage formats, bits, ReLU and residual meet."""
        for row in pairwise({**NUMBERS, "signed_residual": RESIDUALS, "relu": (0, 1)}):
            residual = row["signed_residual"] != NO_RESIDUAL
            op = replace(CROSSED, residual=residual, relu=row["relu"] == 1)
            yield self.quantized(conv2d.with_residual(op, (2, 3, 4, 5)), row)

    def many(self) -> Iterator[Problem]:
        yield from super().many()
        # The longest sum that int32 holds whatever its terms are.
        deep = Conv2d(MOST_DEPTH, 2 + integers.FULL, (1, 1), bias=True)
        yield Problem(QuantizedConv2d(deep, ("uint8",)), ((1, MOST_DEPTH, 1, 1),))
        # Beyond what TMA encodes and what shared memory holds, as for floats, with channels for
        # kernels that require a multiple of 16.
        yield from self._in_turn(
            conv2d.fused(op, shape)
            for op, shape in (
                (Conv2d(16, 16, (1, 250)), (1, 16, 1, 260)),
                (Conv2d(16, 16, (50, 1)), (1, 16, 51, 40)),
                (Conv2d(16, 16, (1, 3)), (1, 16, 1, 520)),
                (Conv2d(16, 16, (1, 1), (9, 9)), (1, 16, 10, 19)),
            )
        )

    def vast(self) -> Iterator[Problem]:
        yield from super().vast()
        # An image that is small enough without its padding; few outputs, for kernels that require
        # a multiple of 16 channels.
        tall = Conv2d(1, 16, (3, 1), (64, 1), (1, 0), bias=True)
        yield from self._in_turn((Problem(tall, ((1, 1, BEYOND_INDEX - 1, 1),)),))

    def many_tiles(self) -> Iterator[Problem]:
        """Problems of many tiles like those of floats, with channels for kernels that require a
        multiple of 16."""
        window = Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
        tiles = (SEVERAL_TILES, 16, 1, 1)
        yield from self._in_turn(
            (
                conv2d.fused(window, tiles),
                conv2d.with_residual(replace(window, bias=True), tiles),
                conv2d.fused(Conv2d(16, 272, (1, 1)), (120, 16, 1, 1)),
                conv2d.fused(Conv2d(16, 32_768, (1, 1)), (1, 16, 1, 1)),
                # More than seven blocks of one tile for each multiprocessor.
                conv2d.fused(Conv2d(16, 16, (1, 1)), (1_000, 16, 1, 1)),
            )
        )

    # -- what it computes ----------------------------------------------------------------------

    def sums(self, op: QuantizedConv2d, inputs: Tensors, weights: Tensors) -> Sums:
        """float64 adds integers exactly in any order; the bias is added as an integer."""
        conv, (weight, bias, multiplier, *more) = op.conv, weights
        products = conv2d.SPEC.sums(conv, inputs, (weight,))
        return Sums(
            total=products.long() + bias.long()[:, None, None],
            multiplier=multiplier.float()[:, None, None],
            stored=op.output_storage,
            residual=inputs[1] if conv.residual else None,
            residual_multiplier=more[0].float() if conv.residual else None,
            relu=conv.relu,
        )

    def reference(self, op: QuantizedConv2d, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return requantized(self.sums(op, inputs, weights))

    def explain(self, op: QuantizedConv2d, inputs: Tensors, weights: Tensors, got: Array) -> str:
        return explained(self.sums(op, inputs, weights), got)

    # -- inputs --------------------------------------------------------------------------------

    def variants(self, kind: str) -> int:
        return len(EDGES) if kind == "edges" else 1

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        op = problem.op
        assert isinstance(op, QuantizedConv2d)
        makers = {
            "impulse": self._impulse,
            "normal": self._normal,
            "positive": self._positive,
            "cancelling": self._cancelling,
            "wide": self._wide,
            "edges": self._edges,
        }
        x, w, rest = makers[kind](problem, op, rng, variant)
        bias, multiplier, residual, residual_multiplier = rest
        if not op.conv.residual:
            return (x,), (w, bias, multiplier)
        return (x, residual), (w, bias, multiplier, residual_multiplier)

    def _impulse(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, variant: int
    ) -> tuple[Array, Array, Arrays]:
        channels = (op.conv.out_channels,)
        x, w = integers.impulse(self, problem, rng, variant)
        return x, w, (np.zeros(channels), np.ones(channels), np.zeros(problem.output), np.ones(1))

    def _normal(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, variant: int
    ) -> tuple[Array, Array, Arrays]:
        x = integers.whole(rng, problem.inputs[0], op.stored[0])
        w = integers.weight(rng, op.weights()[0].shape, op.bits)
        typical = self._typical(op, x, w)
        return x, w, self._rest(problem, op, rng, typical)

    def _positive(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, variant: int
    ) -> tuple[Array, Array, Arrays]:
        """Sums of one sign, in half of the channels the other: many outputs saturate."""
        x = integers.upper(rng, problem.inputs[0], op.stored[0])
        w = np.abs(integers.weight(rng, op.weights()[0].shape, op.bits))
        w[1::2] *= -1
        bias, *rest = self._rest(
            problem, op, rng, float(np.mean(x)) * float(np.abs(w).sum(axis=(1, 2, 3)).mean()) / 4
        )
        return x, w, (np.abs(bias), *rest)

    def _cancelling(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, variant: int
    ) -> tuple[Array, Array, Arrays]:
        """A residual, or without one a bias, that nearly cancels the sums."""
        x, w, (bias, multiplier, residual, scale) = self._normal(problem, op, rng, variant)
        total = self._totals(op, x, w, bias)
        if not op.conv.residual:
            bias -= np.rint(total.mean(axis=(0, 2, 3)))
            return x, w, (bias, multiplier, residual, scale)
        low, high = RANGES[op.stored[1]]
        wanted = -(total * multiplier[:, None, None]) / scale[0]
        residual = np.rint(wanted + rng.integers(-2, 3, wanted.shape)).clip(low, high)
        return x, w, (bias, multiplier, residual, scale)

    def _wide(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, variant: int
    ) -> tuple[Array, Array, Arrays]:
        """Multipliers and biases over many binades: nothing is left, or everything saturates."""
        x, w, (bias, multiplier, residual, scale) = self._normal(problem, op, rng, variant)
        spread = np.exp2(rng.uniform(-12, 8, multiplier.shape)).astype(np.float32)
        multiplier = (multiplier.astype(np.float32) * spread).astype(np.float64)
        room = integers.room(op.conv.depth, op.bits)
        bias = np.rint(np.exp2(rng.uniform(0, math.log2(max(2, room)), bias.shape)) - 1)
        return x, w, (bias * rng.choice([-1, 1], bias.shape), multiplier, residual, scale)

    def _edges(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, variant: int
    ) -> tuple[Array, Array, Arrays]:
        makers: dict[str, Callable[..., tuple[Array, Array, Arrays]]] = {
            "ties": self._ties,
            "ends": self._ends,
            "beyond_int32": self._beyond_int32,
            "largest_sums": self._largest_sums,
            **{name: partial(self._near_ties, variation=name) for name in SUBTLE},
        }
        return makers[EDGES[variant % len(EDGES)]](problem, op, rng)

    def _ties(self, problem: Problem, op: QuantizedConv2d, rng: Rng) -> tuple[Array, Array, Arrays]:
        """Multiples of a half, quarter or eighth."""
        filters, channels = op.weights()[0].shape, (op.conv.out_channels,)
        few = max(1, 24 // op.conv.depth)
        x = integers.small(rng, problem.inputs[0], op.stored[0], min(15, few + 2))
        w = integers.weight(rng, filters, op.bits).clip(-3, 3)
        w *= rng.random(filters) < min(1.0, 16 / op.conv.depth)
        residual = integers.whole(rng, problem.output, _stored_residual(op))
        rest = integers.biases(rng, channels, 9), integers.powers(rng, channels, -3, -1)
        return x, w, (*rest, residual, integers.powers(rng, (1,), -2, 0))

    def _ends(self, problem: Problem, op: QuantizedConv2d, rng: Rng) -> tuple[Array, Array, Arrays]:
        x = integers.ends(rng, problem.inputs[0], op.stored[0])
        w = rng.choice([-1, 1], op.weights()[0].shape) * float(LIMITS[op.bits])
        residual = integers.ends(rng, problem.output, _stored_residual(op))
        bias, multiplier, _, scale = self._rest(problem, op, rng, self._typical(op, x, w) / 8)
        return x, w, (bias, multiplier, residual, scale)

    def _beyond_int32(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng
    ) -> tuple[Array, Array, Arrays]:
        """Numbers of both signs that a conversion to int32 does not hold."""
        x, w, (bias, multiplier, residual, scale) = self._normal(problem, op, rng, 0)
        return x, w, (bias, np.minimum(multiplier * 2.0**40, 2.0**60), residual, scale)

    def _largest_sums(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng
    ) -> tuple[Array, Array, Arrays]:
        """The largest number of each channel is a tie to the last bit, so that it shows an inexact
        sum."""
        (filters, *_), clamped = op.weights(), op.conv.relu
        x, w, bias = integers.largest(
            rng, problem.inputs[0], op.stored[0], filters, op.bits, both_signs=not clamped
        )
        most = np.abs(self._totals(op, x, w, bias)).max(axis=(0, 2, 3))
        # A tie shows an error of one direction: of the other one if its even neighbour is below.
        odd = (np.arange(len(most)) // 2 + rng.integers(2)) % 2
        wanted = 2 * rng.integers(1, 49, most.shape) + odd + 0.5
        multiplier = (wanted / np.maximum(most, 1).astype(np.float32)).astype(np.float32)
        multiplier = multiplier.astype(np.float64)
        return x, w, (bias, multiplier, np.zeros(problem.output), np.ones(1))

    def _near_ties(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, *, variation: str
    ) -> tuple[Array, Array, Arrays]:
        """A black image, so that each channel's sums are its bias: one that a variation shows.

        Biases, multipliers and residuals are drawn such that the number is a tie, or one to the
        last bit of float32, and tried: those for which the variation gives another integer stay.
        If there are more channels than `SEARCHED`, the later ones get those of the first.
        """
        channels, residual = op.conv.out_channels, op.conv.residual
        size = min(channels, SEARCHED), CANDIDATES
        room = integers.room(op.conv.depth, op.bits)
        low = min(2.0**24, room / 2) if variation == UNCONVERTED else 2.0**10
        bias = np.rint(rng.uniform(low, max(2.0, min(room, 2.0**29)), size))
        # Without a residual the tie is anywhere; with one it is near 0, where cancelling shows.
        least, most = RANGES[_stored_residual(op)]
        scale = np.float32(rng.uniform(0.5, 1.5)) if residual else np.float32(1)
        added = rng.integers(least, most + 1, size).astype(np.float64) * residual
        wanted = rng.integers(-3, 5, size) + 0.5 if residual else rng.integers(2, 99, size) + 0.5
        middle = wanted - (added.astype(np.float32) * scale)
        bias = np.copysign(bias, middle)
        multiplier = (np.abs(middle) / np.abs(bias.astype(np.float32))).astype(np.float32)
        multiplier = np.maximum(multiplier, np.float32(2.0**-40))
        sums = Sums(
            total=torch.from_numpy(bias).long(),
            multiplier=torch.from_numpy(multiplier),
            stored=op.output_storage,
            residual=torch.from_numpy(added) if residual else None,
            residual_multiplier=torch.tensor([scale]) if residual else None,
            relu=op.conv.relu,
        )
        shown = (VARIATIONS[variation](sums) != requantized(sums)).numpy()
        found = np.arange(size[0]), shown.argmax(axis=1)
        biases, multipliers, fields = (
            np.resize(one[found].astype(np.float64), channels) for one in (bias, multiplier, added)
        )
        filters = integers.weight(rng, op.weights()[0].shape, op.bits)
        field = np.broadcast_to(fields[:, None, None], problem.output).copy()
        rest = biases, multipliers, field, np.array([scale], np.float64)
        return np.zeros(problem.inputs[0]), filters, rest

    def _totals(self, op: QuantizedConv2d, x: Array, w: Array, bias: Array) -> Array:
        """The sums with their bias, (N, O, OH, OW)."""
        with threads_for(x.size + w.size):
            products = conv2d.SPEC.sums(op.conv, (torch.from_numpy(x),), (torch.from_numpy(w),))
        found: Array = products.numpy() + bias[:, None, None]
        return found

    def _typical(self, op: QuantizedConv2d, x: Array, w: Array) -> float:
        """A typical sum: of K products with random signs."""
        size = float(np.sqrt(np.mean(np.square(x)) * np.mean(np.square(w))))
        return size * math.sqrt(op.conv.depth)

    def _rest(
        self, problem: Problem, op: QuantizedConv2d, rng: Rng, typical: float
    ) -> tuple[Array, ...]:
        """Bias, multiplier, residual and its multiplier."""
        channels = (op.conv.out_channels,)
        residual = integers.whole(rng, problem.output, _stored_residual(op))
        scale = rng.uniform(0.2, 1.8, (1,)).astype(np.float32).astype(np.float64)
        return (
            integers.biases(rng, channels, typical),
            integers.multipliers(rng, channels, typical),
            residual,
            scale,
        )


def _stored_residual(op: QuantizedConv2d) -> str:
    """The storage format of the residual; uint8, which is not used, where there is none."""
    return op.stored[-1] if op.conv.residual else "uint8"


SPEC = QuantizedConv2dSpec()
