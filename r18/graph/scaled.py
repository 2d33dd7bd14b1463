"""Scaled ops: e4m3 numbers with scales, multiplied exactly and added up in float32.

A value q of a tensor stands for the number q·s. The scale s is the tensor's own, and of a weight
its output channel's. e4m3 has 4 significand bits, the exponents −6 … 8, subnormals down to 2⁻⁹, and
no infinity: the largest number is 448, and a NaN stays one. Unlike integers, these are numbers:
kernels are judged by a bound, not to the bit.

A convolution computes, from weight w, bias b and multiplier m, and from a residual r and its
multiplier f if there is one,

    y[o] = store(relu(m[o] · Σ w·x + b[o] + f · r)),

where `store` saturates at ±448 and rounds to e4m3 once, to nearest, ties to even. Products are
exact, since they have 8 significand bits. Everything else is float32, in any order, with fused
multiply-adds or without; how a unit adds up is part of a kernel's rounding contract. With scales s,
m[o] = s_x·s_w[o] / s_y, b[o] is the number over s_y, and f = s_r / s_y.

Max-pooling is `MaxPool2d`: it moves values, whose scale stays. `ScaledGlobalAvgPool` makes means in
float32, in units of its input's scale. `ScaledLinear` multiplies these: m[o] · Σ w·x + b[o] with
m[o] = s_x·s_w[o], which are logits in float32. `Scale` stores x / s of the network's image.

`ScaledConvMaxPool` is its ops one after the other: scale, convolution, max-pooling. Multipliers are
positive, so every step after a sum keeps order, and the largest sum becomes the largest number.
`ScaledAvgPoolLinear` is pooling and linear layer one after the other; its means are float32 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from r18.errors import ShapeError, show
from r18.graph.forms import AvgPoolLinearForm, ConvForm, ConvMaxPoolForm, LinearForm, factor
from r18.graph.ops import (
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
    Shape,
    WeightSpec,
)

WIDE = "float32"
"""The format of everything that is not stored in e4m3."""


@dataclass(frozen=True)
class Scale(Op):
    """Numbers in float32 into e4m3: x / scale, saturated and rounded."""

    name: ClassVar[str] = "scale"
    optional: ClassVar[bool] = True

    @property
    def input_storage(self) -> tuple[str, ...]:
        return (WIDE,)

    def weights(self) -> tuple[WeightSpec, ...]:
        return (factor("scale", (1,)),)

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs, ndim=None)
        return inputs[0]


@dataclass(frozen=True)
class ScaledConv2d(ConvForm):
    """A convolution of scaled values with bias. conv: with a bias; what it fuses is fused here."""

    name: ClassVar[str] = "sconv2d"
    optional: ClassVar[bool] = True

    conv: Conv2d

    def __post_init__(self) -> None:
        if not isinstance(self.conv, Conv2d) or not self.conv.bias:
            raise ShapeError(f"{self.name} scales a Conv2d with a bias, got {show(self.conv)}")

    @property
    def label(self) -> str:
        return f"s{self.conv.label}"

    def weights(self) -> tuple[WeightSpec, ...]:
        weight, bias = self.conv.weights()
        found = (weight, bias, factor("multiplier", bias.shape))
        return (*found, factor("residual_multiplier", (1,))) if self.conv.residual else found


@dataclass(frozen=True)
class ScaledGlobalAvgPool(Op):
    """The mean over height and width of e4m3 numbers, in float32; the scale stays the same."""

    name: ClassVar[str] = "sgap"
    optional: ClassVar[bool] = True

    @property
    def output_storage(self) -> str:
        return WIDE

    def infer(self, *inputs: Shape) -> Shape:
        return GlobalAvgPool().infer(*inputs)


@dataclass(frozen=True)
class ScaledLinear(LinearForm):
    """multiplier · (x · wᵀ) + bias of float32 means and e4m3 weights, to float32 logits."""

    name: ClassVar[str] = "slinear"
    optional: ClassVar[bool] = True

    linear: Linear

    def __post_init__(self) -> None:
        if not isinstance(self.linear, Linear):
            raise ShapeError(f"{self.name} scales a Linear, got {show(self.linear)}")

    @property
    def input_storage(self) -> tuple[str, ...]:
        return (WIDE,)

    @property
    def output_storage(self) -> str:
        return WIDE

    def weights(self) -> tuple[WeightSpec, ...]:
        weight, bias = self.linear.weights()
        return weight, bias, factor("multiplier", bias.shape)


@dataclass(frozen=True)
class ScaledConvMaxPool(ConvMaxPoolForm):
    """A scaled convolution and max-pooling; the convolution's result need never be stored.

    The result is that of the ops one after the other. image: where it is given, it makes the
    convolution's e4m3 numbers of the image in float32; its scale is the last weight.

    No fusion level asks for it: a plan takes it where the backend has a kernel for it
    (`r18.runtime.fusing`).
    """

    name: ClassVar[str] = "sconv2d_maxpool2d"
    optional: ClassVar[bool] = True

    conv: ScaledConv2d
    pool: MaxPool2d
    image: Scale | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.conv, ScaledConv2d) and isinstance(self.pool, MaxPool2d)):
            given = f"{type(self.conv).__name__} and {type(self.pool).__name__}"
            raise ShapeError(f"{self.name} is made of a ScaledConv2d and a MaxPool2d: {given}")
        if self.conv.conv.residual:
            raise ShapeError(f"{self.name}: the convolution takes no residual, got {self.label}")
        if not isinstance(self.image, Scale | None):
            raise ShapeError(f"{self.name}: image is a Scale, got {show(self.image)}")

    @property
    def parts(self) -> tuple[Op, ...]:
        both = (self.conv, self.pool)
        return both if self.image is None else (self.image, *both)


@dataclass(frozen=True)
class ScaledAvgPoolLinear(AvgPoolLinearForm):
    """Global average pooling of e4m3 numbers and the linear layer of its means, to float32 logits.

    The means need never be stored. They are float32, rounded as `ScaledGlobalAvgPool` rounds them,
    and never e4m3: the result is that of the ops one after the other. The weights are those of the
    layer.

    No fusion level asks for it: a plan takes it where the backend has a kernel for it
    (`r18.runtime.fusing`).
    """

    name: ClassVar[str] = "sgap_linear"
    optional: ClassVar[bool] = True

    linear: ScaledLinear

    def __post_init__(self) -> None:
        if not isinstance(self.linear, ScaledLinear):
            raise ShapeError(f"{self.name} takes a ScaledLinear, got {show(self.linear)}")

    @property
    def parts(self) -> tuple[Op, ...]:
        return ScaledGlobalAvgPool(), self.linear

    def weights(self) -> tuple[WeightSpec, ...]:
        return self.linear.weights()


SCALED_OPS: tuple[type[Op], ...] = (
    Scale,
    ScaledConv2d,
    ScaledGlobalAvgPool,
    ScaledLinear,
    ScaledConvMaxPool,
    ScaledAvgPoolLinear,
)

__all__ = [
    "SCALED_OPS",
    "Scale",
    "ScaledAvgPoolLinear",
    "ScaledConv2d",
    "ScaledConvMaxPool",
    "ScaledGlobalAvgPool",
    "ScaledLinear",
]
