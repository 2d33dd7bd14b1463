"""Quantised ops: integers in, exact sums, and a requantisation that is specified to the bit.

An integer q stands for the number q·s. The scale s is the tensor's own, and of a weight its output
channel's; every zero point is 0. Activations are uint8 after a ReLU and int8 elsewhere; weights are
symmetric integers of 8, 4 or 2 bits (`LIMITS`). Sums are int32 and exact, so the order of summation
is free: two correct kernels give the same bits.

Requantisation, in float32. Each operation is rounded to nearest, ties to even; none is fused with
another one. `fl` is such a rounding, `sum` the int32 sum with its bias:

1. t = fl(fl(sum) · m[o]) with m[o] = fl(fl(s_x · s_w[o]) / s_y), the weight `multiplier`.
2. With a residual r: t = fl(t + fl(r · fl(s_r / s_y))), the weight `residual_multiplier`.
3. With ReLU: t = max(t, 0).
4. y = t rounded to the nearest integer, ties to even, and saturated: to 0 … 255 in uint8, to
   −128 … 127 in int8.

Max-pooling moves values. `QuantizedConvMaxPool` and `QuantizedAvgPoolLinear` are their ops one
after the other. Each step of requantisation keeps order, because multipliers are positive: the
largest sum of a window becomes the largest of its integers, so to pool the int32 sums first gives
the same bits. Global pooling is steps 1 and 4 of the int32 sum over height and width, with the
multiplier fl(s_x / (H·W·s_y)), rounded once. Linear ends with step 1, for the multiplier
fl(s_x · s_w[o]): its logits are float32. `Quantize` is step 4 of fl(x / s). The integers of pixels
come from a table of 256 for each channel: ((v / 255 − mean) / std) / s in float64, in this order,
rounded to integers once.

A weight beyond the limit of its bits, and a multiplier or scale that is not positive and finite,
are refused when weights are prepared. Where a bias takes the sum out of int32, the output is not
specified; `r18.graph.quantize` refuses to make such weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from r18.errors import ShapeError, WeightsError, show
from r18.graph.forms import AvgPoolLinearForm, ConvForm, ConvMaxPoolForm, LinearForm, factor
from r18.graph.ops import (
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Relayout,
    Shape,
    WeightSpec,
    as_int,
)

Array = npt.NDArray[Any]

STORAGES = ("uint8", "int8")
"""The storage formats of quantised activations."""

RELAID = (*STORAGES, "float32")
"""The storage formats of values whose memory layout a quantised network changes."""

LIMITS = {8: 127, 4: 7, 2: 1}
"""The largest magnitude of a weight, by its bits."""

MOST_SUM = 2**31 - 1
MOST_DEPTH = MOST_SUM // (255 * 127)
"""The most products in a sum: 66,311 of them, of bytes and weights, cannot leave int32."""

PIXELS = 256
"""The values of a byte."""


def _storage(op: str, value: object) -> str:
    if value not in STORAGES:
        raise ShapeError(f"{op}: activations are stored as uint8 or int8, got {show(value)}")
    return str(value)


def _bits(op: str, value: object) -> int:
    bits = as_int(value, f"{op}: bits")
    if bits not in LIMITS:
        raise ShapeError(f"{op}: weights have 8, 4 or 2 bits, got {bits}")
    return bits


def limit_of(bits: int) -> int:
    """The largest magnitude of a weight with this number of bits.

    Raises `ShapeError` unless there are 8, 4 or 2.
    """
    return LIMITS[_bits("a quantised weight", bits)]


def _check_depth(op: str, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise ShapeError(
            f"{op}: {depth:,} products in a sum may leave int32; at most {MOST_DEPTH:,} cannot"
        )


def check_factors(whose: str, what: str, values: Array) -> None:
    """Raise `WeightsError` unless each multiplier or scale is positive and finite."""
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if wrong.size:
        channel = int(wrong[0])
        raise WeightsError(
            f"{whose}: the {what} of channel {channel} must be positive and finite in float32, got "
            f"{values[channel]}"
        )


def _weights_of_sum(op: Conv2d | Linear, bits: int) -> tuple[WeightSpec, ...]:
    """The weights of an op with a bias: weight and bias in integers, and the multiplier of the
    sum."""
    weight, bias = op.weights()
    return (
        replace(weight, storage="int8", limit=LIMITS[bits]),
        replace(bias, storage="int32"),
        factor("multiplier", bias.shape),
    )


@dataclass(frozen=True)
class QuantizedConv2d(ConvForm):
    """A convolution of integers with bias, requantised.

    conv: with a bias; what it fuses is fused here. stored: the storage format of the image, and of
    the residual if there is one. bits: of a weight.
    """

    name: ClassVar[str] = "qconv2d"
    optional: ClassVar[bool] = True

    conv: Conv2d
    stored: tuple[str, ...]
    bits: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.conv, Conv2d) or not self.conv.bias:
            raise ShapeError(f"{self.name} quantises a Conv2d with a bias, got {show(self.conv)}")
        if not isinstance(self.stored, tuple | list) or len(self.stored) != self.arity:
            raise ShapeError(
                f"{self.label}: stored names the storage format of each of its {self.arity} "
                f"input(s), got {show(self.stored)}"
            )
        object.__setattr__(self, "stored", tuple(_storage(self.name, s) for s in self.stored))
        object.__setattr__(self, "bits", _bits(self.name, self.bits))
        _check_depth(self.name, self.conv.depth)

    @property
    def label(self) -> str:
        return f"q{self.conv.label}"

    @property
    def input_storage(self) -> tuple[str, ...]:
        return self.stored

    @property
    def output_storage(self) -> str:
        return "uint8" if self.conv.relu else "int8"

    def weights(self) -> tuple[WeightSpec, ...]:
        found = _weights_of_sum(self.conv, self.bits)
        if not self.conv.residual:
            return found
        return (*found, factor("residual_multiplier", (1,)))


class _OfOneImage(Op):
    """An op whose input has the storage format `stored`; its output too, unless it says another."""

    stored: str

    @property
    def input_storage(self) -> tuple[str, ...]:
        return (self.stored,)

    @property
    def output_storage(self) -> str:
        return self.stored


@dataclass(frozen=True)
class QuantizedMaxPool2d(_OfOneImage):
    """Max-pooling of integers; scale and storage format stay the same."""

    name: ClassVar[str] = "qmaxpool2d"
    optional: ClassVar[bool] = True

    pool: MaxPool2d
    stored: str = "uint8"

    def __post_init__(self) -> None:
        if not isinstance(self.pool, MaxPool2d):
            raise ShapeError(f"{self.name} quantises a MaxPool2d, got {show(self.pool)}")
        _storage(self.name, self.stored)

    def infer(self, *inputs: Shape) -> Shape:
        return self.pool.infer(*inputs)

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        return self.pool.covered(*inputs)


@dataclass(frozen=True)
class QuantizedGlobalAvgPool(_OfOneImage):
    """The mean over height and width of integers, requantised to their storage format."""

    name: ClassVar[str] = "qgap"
    optional: ClassVar[bool] = True

    stored: str = "uint8"

    def __post_init__(self) -> None:
        _storage(self.name, self.stored)

    def weights(self) -> tuple[WeightSpec, ...]:
        return (factor("multiplier", (1,)),)

    def infer(self, *inputs: Shape) -> Shape:
        output = GlobalAvgPool().infer(*inputs)
        pixels = math.prod(inputs[0][2:])
        if 255 * pixels > MOST_SUM:
            raise ShapeError(f"{self.name}: a sum of {pixels:,} bytes may leave int32")
        return output


@dataclass(frozen=True)
class QuantizedLinear(LinearForm, _OfOneImage):
    """x · wᵀ + bias of integers, to float32 logits. stored: of x. bits: of a weight."""

    name: ClassVar[str] = "qlinear"
    optional: ClassVar[bool] = True

    linear: Linear
    stored: str = "uint8"
    bits: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.linear, Linear):
            raise ShapeError(f"{self.name} quantises a Linear, got {show(self.linear)}")
        _storage(self.name, self.stored)
        object.__setattr__(self, "bits", _bits(self.name, self.bits))
        _check_depth(self.name, self.linear.in_features)

    @property
    def output_storage(self) -> str:
        return "float32"

    def weights(self) -> tuple[WeightSpec, ...]:
        return _weights_of_sum(self.linear, self.bits)


@dataclass(frozen=True)
class Quantize(Op):
    """Numbers into int8: fl(x / scale), rounded and saturated. NaN is not specified."""

    name: ClassVar[str] = "quantize"
    optional: ClassVar[bool] = True

    @property
    def input_storage(self) -> tuple[str, ...]:
        return ("float32",)

    @property
    def output_storage(self) -> str:
        return "int8"

    def weights(self) -> tuple[WeightSpec, ...]:
        return (factor("scale", (1,)),)

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs, ndim=None)
        return inputs[0]


@dataclass(frozen=True)
class QuantizePixels(Op):
    """Pixels into int8, by a table: y[n, c, i, j] = table[c, x[n, c, i, j]].

    normalize: the table is made of it and a scale.
    """

    name: ClassVar[str] = "quantize_pixels"
    optional: ClassVar[bool] = True

    normalize: Normalize

    def __post_init__(self) -> None:
        if not isinstance(self.normalize, Normalize):
            raise ShapeError(f"{self.name} takes a Normalize, got {show(self.normalize)}")

    @property
    def of_pixels(self) -> bool:
        return True

    @property
    def input_storage(self) -> tuple[str, ...]:
        return ("uint8",)

    @property
    def output_storage(self) -> str:
        return "int8"

    def table(self, scale: np.float32) -> Array:
        """The weight, (C, 256) in int8: (v / 255 − mean) / std in units of the scale.

        Computed in float64 and rounded once, ties to even; saturated.
        """
        mean, std = (np.array(v)[:, None] for v in (self.normalize.mean, self.normalize.std))
        numbers = (np.arange(PIXELS) / 255 - mean) / std / np.float64(np.float32(scale))
        found: Array = np.clip(np.rint(numbers), -128, 127).astype(np.int8)
        return found

    def weights(self) -> tuple[WeightSpec, ...]:
        return (WeightSpec("table", (self.normalize.channels, PIXELS), "CP", "table", "int8"),)

    def infer(self, *inputs: Shape) -> Shape:
        return self.normalize.infer(*inputs)


@dataclass(frozen=True)
class QuantizedConvMaxPool(ConvMaxPoolForm):
    """A convolution of integers and max-pooling; the convolution's result need never be stored.

    The result is that of the ops one after the other. image: where it is given, it makes the
    convolution's integers of the image, which are numbers (`Quantize`) or pixels
    (`QuantizePixels`); its scale or its table is the last weight. The convolution's padding is the
    integer 0, whatever the table says of a black pixel.

    No fusion level asks for it: a plan takes it where the backend has a kernel for it
    (`r18.runtime.fusing`).
    """

    name: ClassVar[str] = "qconv2d_maxpool2d"
    optional: ClassVar[bool] = True

    conv: QuantizedConv2d
    pool: MaxPool2d
    image: Quantize | QuantizePixels | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.conv, QuantizedConv2d) and isinstance(self.pool, MaxPool2d)):
            given = f"{type(self.conv).__name__} and {type(self.pool).__name__}"
            raise ShapeError(f"{self.name} is made of a QuantizedConv2d and a MaxPool2d: {given}")
        if self.conv.conv.residual:
            raise ShapeError(f"{self.name}: the convolution takes no residual, got {self.label}")
        if self.image is None:
            return
        if not isinstance(self.image, Quantize | QuantizePixels):
            raise ShapeError(
                f"{self.name}: image is a Quantize or a QuantizePixels, got {show(self.image)}"
            )
        if self.conv.stored[0] != self.image.output_storage:
            raise ShapeError(
                f"{self.name}: {self.image.label} makes {self.image.output_storage}, and the "
                f"convolution reads {self.conv.stored[0]}"
            )
        if isinstance(self.image, Quantize):
            return
        if self.conv.conv.in_channels != self.image.normalize.channels:
            raise ShapeError(
                f"{self.name}: pixels of {self.image.normalize.channels} channels, and the "
                f"convolution reads {self.conv.conv.in_channels}"
            )

    @property
    def parts(self) -> tuple[Op, ...]:
        pool = QuantizedMaxPool2d(self.pool, self.output_storage)
        return (self.conv, pool) if self.image is None else (self.image, self.conv, pool)

    @property
    def of_pixels(self) -> bool:
        return self.image is not None and self.image.of_pixels

    @property
    def output_storage(self) -> str:
        return self.conv.output_storage


@dataclass(frozen=True)
class QuantizedAvgPoolLinear(AvgPoolLinearForm):
    """Global average pooling of integers and the linear layer of its means, which need never be
    stored.

    The result is that of the ops one after the other: the means are requantised. The pooling's
    multiplier is the last weight.

    No fusion level asks for it: a plan takes it where the backend has a kernel for it
    (`r18.runtime.fusing`).
    """

    name: ClassVar[str] = "qgap_linear"
    optional: ClassVar[bool] = True

    gap: QuantizedGlobalAvgPool
    linear: QuantizedLinear

    def __post_init__(self) -> None:
        whole = isinstance(self.gap, QuantizedGlobalAvgPool)
        if not (whole and isinstance(self.linear, QuantizedLinear)):
            given = f"{type(self.gap).__name__} and {type(self.linear).__name__}"
            raise ShapeError(
                f"{self.name} is made of a QuantizedGlobalAvgPool and a QuantizedLinear: {given}"
            )
        if self.gap.output_storage != self.linear.stored:
            raise ShapeError(
                f"{self.name}: {self.gap.label} makes {self.gap.output_storage}, and the linear "
                f"layer reads {self.linear.stored}"
            )

    @property
    def parts(self) -> tuple[Op, ...]:
        return self.gap, self.linear

    def weights(self) -> tuple[WeightSpec, ...]:
        (multiplier,) = self.gap.weights()
        return (*self.linear.weights(), replace(multiplier, role="mean_multiplier"))


@dataclass(frozen=True)
class QuantizedRelayout(_OfOneImage, Relayout):
    """The same values in another memory layout, where the precision does not say their format.

    Plans of a quantised network have it where plans of floats have `Relayout`. stored: the storage
    format of the values; float32 of the network's images.
    """

    name: ClassVar[str] = "qrelayout"
    optional: ClassVar[bool] = True

    stored: str = "uint8"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stored not in RELAID:
            raise ShapeError(
                f"{self.name}: values are stored as {', '.join(RELAID[:-1])} or {RELAID[-1]}, got "
                f"{show(self.stored)}"
            )

    @property
    def label(self) -> str:
        return f"q{super().label}"


QUANTIZED_OPS: tuple[type[Op], ...] = (
    QuantizedConv2d,
    QuantizedMaxPool2d,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    Quantize,
    QuantizePixels,
    QuantizedRelayout,
    QuantizedConvMaxPool,
    QuantizedAvgPoolLinear,
)

__all__ = [
    "LIMITS",
    "MOST_DEPTH",
    "QUANTIZED_OPS",
    "RELAID",
    "STORAGES",
    "Quantize",
    "QuantizePixels",
    "QuantizedAvgPoolLinear",
    "QuantizedConv2d",
    "QuantizedConvMaxPool",
    "QuantizedGlobalAvgPool",
    "QuantizedLinear",
    "QuantizedMaxPool2d",
    "QuantizedRelayout",
    "check_factors",
    "limit_of",
]
