"""Synthetic weights: no download, the ranges of a trained network, the same bits on every machine.

Random weights make a bad test: without BatchNorm statistics that fit them, activations explode or
vanish within a few layers, and then every backend agrees, or none does. So the statistics are
measured: the network runs on seeded images, step by step, and each BatchNorm gets the mean and
variance of its input.

The same bits everywhere, whatever the BLAS, its threads or the version of NumPy:

- Randomness is raw words of Philox, whose stream NumPy guarantees (its distributions it does
  not), with a key for each tensor from the seed and the tensor's name.
- The measuring run is in fixed point. Activations are integer multiples of 2^-12, weights of 12
  bits; both are held in float64 as integers, so every product and every partial sum of a matmul
  is an integer, and below 2^53 (checked) it is exact: no order of summation changes it.
- Everything else is elementwise +, −, ×, ÷, √ and rounding to an integer, which IEEE 754 defines
  to the bit, or sums of integers.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from r18.errors import WeightsError
from r18.graph.ops import Add, BatchNorm, Conv2d, GlobalAvgPool, Linear, MaxPool2d, ReLU, Softmax
from r18.graph.schedule import Schedule, Step

Floats = NDArray[np.float64]  # in this file: integers, in units of 2^-FRACTION, except where said

FRACTION = 12
"""Activations are multiples of 2^-FRACTION."""
WEIGHT_BITS = 11
"""Weights of the measuring run are integers of at most 2^WEIGHT_BITS in magnitude."""
SAMPLES = 98
"""Positions that each BatchNorm's statistics come from, at least: two images of 7×7."""
RUN = 1 << 14
"""Random numbers that are made at a time: their words stay in the cache."""
COLUMNS = 1 << 22
"""Elements of the largest im2col matrix: 32 MiB."""

IMAGE_NOISE = {1: 1.0, 8: 0.5, 64: 0.5}
"""The layers of noise in seeded images: the side of their squares in pixels, and the deviation."""
GAMMA = (0.5, 1.5)
"""Range of BatchNorm weights."""
GAMMA_RESIDUAL = (0.25, 0.75)
"""The same where the output goes into a residual sum, so that the sums stay in range."""
BETA = 0.1
"""Standard deviation of BatchNorm, convolution and linear biases."""
FC_GAIN = 4.0
"""Classifier weights are this much larger than He's: logits then spread as a trained network's."""


def synthetic_weights(schedule: Schedule, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Seeded weights for a schedule at fusion level `none`, in the order of `weight_specs`.

    Convolutions are He-normal (He et al., arXiv:1502.01852), BatchNorm statistics are measured on
    seeded images of the schedule's size, and the classifier's bias takes the mean off the logits
    so that images differ in their top-1. The tensors depend only on seed, names, shapes and image
    size; a slice of a network is measured on its own and differs from the whole.

    Raises `WeightsError` for a schedule that was fused or that leaves exact arithmetic.
    """
    if schedule.folds:
        raise WeightsError(
            f"synthetic weights are made for fusion level 'none', got '{schedule.level}'\n"
            "  make them first, then fuse"
        )
    return _Measurement(schedule, seed).run()


# -- random numbers --------------------------------------------------------------------------


def _words(seed: int, name: str, count: int) -> NDArray[np.uint64]:
    digest = hashlib.sha256(f"r18 synthetic {seed} {name}".encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)
    return np.asarray(raw, dtype=np.uint64)


def _uniform(seed: int, name: str, shape: tuple[int, ...], low: float, high: float) -> Floats:
    """Real numbers in [low, high)."""
    words = _words(seed, name, math.prod(shape)) >> np.uint64(11)
    return (low + (high - low) * (words.astype(np.float64) * 2.0**-53)).reshape(shape)


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Floats:
    """Real numbers, nearly normal: the sum of four uniform 16-bit lanes (Irwin–Hall).

    The lanes give 18 bits; 32 bits of a second word go below them, so that mantissas are full.
    """
    count = math.prod(shape)
    first, second = _words(seed, name, 2 * count).reshape(2, -1)
    one = math.sqrt(4 * (2.0**32 - 1) / 12) * 2.0**32  # the standard deviation of `lanes`
    found = np.empty(count)
    for start in range(0, count, RUN):
        words = first[start : start + RUN]
        lanes = words & np.uint64(0xFFFF)
        for shift in (16, 32, 48):
            lanes += (words >> np.uint64(shift)) & np.uint64(0xFFFF)
        signed = lanes.view(np.int64)
        signed -= 2 * 0xFFFF
        signed <<= 32
        signed += (second[start : start + RUN] >> np.uint64(32)).view(np.int64)
        np.multiply(signed.astype(np.float64), std / one, out=found[start : start + RUN])
    return found.reshape(shape)


# -- the measuring run -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Quantised:
    """A weight matrix (O, K) of integers, in units of 2^-bits."""

    units: Floats
    bits: int

    @staticmethod
    def of(weight: NDArray[np.float32]) -> _Quantised:
        matrix = weight.reshape(weight.shape[0], -1).astype(np.float64)
        peak = float(np.abs(matrix).max())
        bits = WEIGHT_BITS - math.frexp(peak)[1]  # peak < 2^exponent
        return _Quantised(np.rint(matrix * math.ldexp(1.0, bits)), bits)

    def times(self, columns: Floats) -> Floats:
        """Integers in units of 2^-(bits + FRACTION): (O, K) · (K, P) → (O, P), exactly."""
        _exact(self.units.shape[1] * _peak(self.units) * _peak(columns), 53)
        product: Floats = np.matmul(self.units, columns)
        return product


class _Measurement:
    """Walks the steps with channels-first values (C, N, H, W) or (F, N), making weights as it goes.

    `tensors` collects the weights; `values` holds what later steps still read.
    """

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule = schedule
        self.seed = seed
        self.tensors: dict[str, NDArray[np.float32]] = {}
        self.residual = {
            value for s in schedule.steps if isinstance(s.op, Add) for value in s.inputs
        }

    def run(self) -> dict[str, NDArray[np.float32]]:
        schedule = self.schedule
        last = {value: step.name for step in schedule.steps for value in step.inputs}
        values = {schedule.input: _images(self.seed, schedule)}
        for step in schedule.steps:
            inputs = [values[value] for value in step.inputs]
            values[step.output] = self._step(step, *inputs)
            for value in set(step.inputs):
                if last[value] == step.name:
                    del values[value]
        return {name: self.tensors[name] for name in schedule.weight_specs}

    def _step(self, step: Step, x: Floats, *others: Floats) -> Floats:
        match step.op:
            case Conv2d():
                return self._conv(step, step.op, x, *others)
            case BatchNorm():
                return self._batchnorm(step, step.op, x)
            case Linear():
                return self._linear(step, step.op, x)
            case ReLU():
                return np.maximum(x, 0.0)
            case Add(relu=relu):
                return np.maximum(x + others[0], 0.0) if relu else x + others[0]
            case MaxPool2d():
                windows = _windows(x, step.op.kernel_size, step.op.stride, step.op.padding, -np.inf)
                return np.asarray(np.max(windows, axis=(-2, -1)))
            case GlobalAvgPool():
                return np.rint(_sums(x, axis=(2, 3)) / math.prod(x.shape[2:]))
            case Softmax():
                return x  # it has no weights and nothing with weights comes behind it
            case _:
                raise WeightsError(
                    f"synthetic weights: step '{step.name}' is a {step.op.label}, "
                    "which the measuring run does not know"
                )

    def _keep(self, name: str, values: Floats) -> NDArray[np.float32]:
        self.tensors[name] = values.astype(np.float32)
        return self.tensors[name]

    def _conv(self, step: Step, op: Conv2d, x: Floats, *residual: Floats) -> Floats:
        shape = (op.out_channels, op.group_channels, *op.kernel_size)
        name = step.weights[0]
        weight = self._keep(name, normal(self.seed, name, shape, math.sqrt(2 / op.depth)))
        y = _convolve(_Quantised.of(weight), op, x)
        if op.bias:
            name = step.weights[1]
            bias = self._keep(name, normal(self.seed, name, shape[:1], BETA))
            y += _fixed(bias.astype(np.float64))[:, None, None, None]
        for other in residual:
            y += other
        return np.maximum(y, 0.0) if op.relu else y

    def _batchnorm(self, step: Step, op: BatchNorm, x: Floats) -> Floats:
        names = dict(zip((spec.role for spec in op.weights()), step.weights, strict=True))
        low, high = GAMMA_RESIDUAL if step.output in self.residual else GAMMA
        gamma = _uniform(self.seed, names["weight"], (op.channels,), low, high)
        beta = normal(self.seed, names["bias"], (op.channels,), BETA)
        means, variances = _moments(x)
        # The code below uses the float32 tensors, as the network will.
        gamma, beta, mean, var = (
            self._keep(names[role], values).astype(np.float64)[:, None, None, None]
            for role, values in (
                ("weight", gamma),
                ("bias", beta),
                ("running_mean", means),
                ("running_var", variances),
            )
        )
        return _fixed((x * 2.0**-FRACTION - mean) / np.sqrt(var + op.eps) * gamma + beta)

    def _linear(self, step: Step, op: Linear, x: Floats) -> Floats:
        """The bias takes off each logit's mean over the seeded images."""
        name, bias_name = step.weights
        shape = (op.out_features, op.in_features)
        std = FC_GAIN * math.sqrt(2 / op.in_features)
        weight = _Quantised.of(self._keep(name, normal(self.seed, name, shape, std)))
        centre = weight.times(_sums(x, axis=1)[:, None])[:, 0]
        centre = centre / x.shape[1] * math.ldexp(1.0, -weight.bits - FRACTION)
        noise = normal(self.seed, bias_name, shape[:1], BETA)
        bias = self._keep(bias_name, noise - centre).astype(np.float64)
        return np.rint(weight.times(x) * math.ldexp(1.0, -weight.bits)) + _fixed(bias)[:, None]


def _images(seed: int, schedule: Schedule) -> Floats:
    """Seeded inputs of about unit variance, channels first.

    Noise at several scales, as photographs have it, and little fine noise in every other image:
    fine noise averages out, so of it alone nothing would be left to tell images apart by the time
    of the global average.
    """
    shapes = schedule.shapes(1)
    sizes = [
        math.prod(shapes[s.inputs[0]][2:]) for s in schedule.steps if isinstance(s.op, BatchNorm)
    ]
    count = max(2, -(-SAMPLES // min(sizes, default=SAMPLES)))
    channels, *extents = schedule.input_shape
    total = np.zeros((channels, count, *extents))
    for scale, std in IMAGE_NOISE.items():
        coarse = (channels, count, *(-(-extent // scale) for extent in extents))
        noise = normal(seed, f"{schedule.input}/{scale}", coarse, std)
        if scale == 1:
            noise[:, 1::2] *= 0.25
        for axis in range(2, noise.ndim):
            noise = noise.repeat(scale, axis=axis)
        total += noise[tuple(map(slice, total.shape))]
    return _fixed(total)


def _windows(
    x: Floats,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    fill: float,
    dilation: tuple[int, int] = (1, 1),
) -> Floats:
    """A view (C, N, OH, OW, kh, kw) of the padded input (C, N, H, W)."""
    (top, left), (down, right), (apart_h, apart_w) = padding, stride, dilation
    x = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)), constant_values=fill)
    span = (1 + apart_h * (kernel[0] - 1), 1 + apart_w * (kernel[1] - 1))
    windows = sliding_window_view(x, span, axis=(2, 3))[:, :, ::down, ::right]
    return windows[..., ::apart_h, ::apart_w]


def _convolve(weight: _Quantised, op: Conv2d, x: Floats) -> Floats:
    """The convolution of (C, N, H, W), rounded to units of 2^-FRACTION, group by group."""
    rows = np.split(weight.units, op.groups)
    parts = (_Quantised(units, weight.bits) for units in rows)
    images = np.split(x, op.groups)
    return np.concatenate([_convolve_group(w, op, x) for w, x in zip(parts, images, strict=True)])


def _convolve_group(weight: _Quantised, op: Conv2d, x: Floats) -> Floats:
    """The same of one group's filters and channels, in blocks of columns."""
    windows = _windows(x, op.kernel_size, op.stride, op.padding, 0.0, op.dilation)
    windows = windows.transpose(0, 4, 5, 1, 2, 3)
    images, height, width = windows.shape[3:]
    out = np.empty((len(weight.units), images, height, width))
    some_images = max(1, COLUMNS // (op.depth * height * width))
    some_rows = min(height, max(1, COLUMNS // (op.depth * width)))
    for n in range(0, images, some_images):
        for row in range(0, height, some_rows):
            block = windows[:, :, :, n : n + some_images, row : row + some_rows]
            product = weight.times(block.reshape(op.depth, -1))
            out[:, n : n + some_images, row : row + some_rows] = np.rint(
                product * math.ldexp(1.0, -weight.bits)
            ).reshape(-1, *block.shape[3:])
    return out


# -- exact arithmetic ------------------------------------------------------------------------


def _fixed(values: Floats) -> Floats:
    """Real numbers, rounded to units of 2^-FRACTION."""
    return np.rint(values * 2.0**FRACTION)


def _peak(units: Floats) -> int:
    return int(max(units.max(), -units.min()))


def _exact(bound: int, bits: int) -> None:
    if bound >= 1 << bits:
        raise WeightsError(
            f"synthetic weights: a sum may reach {bound}, beyond the 2^{bits} that is exact; "
            "the schedule is too wide, or its activations grow without bound"
        )


def _sums(units: Floats, axis: int | tuple[int, ...]) -> Floats:
    _exact(units.size * _peak(units), 53)
    return np.asarray(np.sum(units, axis=axis))


def _moments(x: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of each channel, real: integer sums and one rounded division each."""
    rows = x.reshape(x.shape[0], -1).astype(np.int64)
    count = rows.shape[1]
    _exact(count * _peak(x) ** 2, 63)
    means, variances = [], []
    for total, squares in zip(
        rows.sum(axis=1).tolist(), (rows * rows).sum(axis=1).tolist(), strict=True
    ):
        means.append(total / (count << FRACTION))
        variances.append((count * squares - total * total) / (count << FRACTION) ** 2)
    return np.array(means), np.array(variances)


__all__ = ["synthetic_weights"]
