"""Operations as frozen data: what is computed, never how.

Shapes are logical: activations are (N, C, H, W) or (N, F), convolution weights (O, I, kh, kw),
linear weights (O, I), whatever layout a kernel keeps them in. Every op validates itself when it
is made, infers its output shape, names its weights, and counts its multiply-accumulates. The
semantics (padding, NaN, signs of zero) are written once, at the top of `r18.backend`.
"""

from __future__ import annotations

import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import ClassVar

from r18.errors import ShapeError, show

Shape = tuple[int, ...]

EXTRAS = frozenset({"groups", "dilation"})
"""What a convolution may ask beyond what every kernel computes; see `Op.extras`."""

MOST_BYTES = 2**63 - 1
"""The largest size of a tensor or an arena: what a signed 64-bit size can count."""


def as_int(value: object, what: str) -> int:
    """An integer of any kind, NumPy's included, as Python's, which never wraps.

    Raises `ShapeError` for anything else; a bool or a float is no size.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ShapeError(f"{what} must be an integer, got {show(value)}")


def as_shape(value: object, what: str = "a shape") -> Shape:
    """A tuple or list of sizes as a tuple of ints; raises `ShapeError` for anything else."""
    if not isinstance(value, tuple | list):
        raise ShapeError(f"{what} must be a tuple of integers, got {show(value)}")
    return tuple([as_int(extent, what) for extent in value])


def check_size(shape: Shape) -> None:
    """Raise `ShapeError` for a tensor that no memory can hold, in the widest format, float64."""
    if math.prod(shape) > MOST_BYTES // 8:
        raise ShapeError(f"a tensor of shape {shape} is too large: its bytes exceed 2⁶³ − 1")


class Layout(Enum):
    """The order in which a kernel keeps 4-d activations in memory; 2-d ones are row-major."""

    NCHW = "nchw"
    NHWC = "nhwc"

    def physical(self, shape: Shape) -> Shape:
        """The shape in memory of a tensor whose logical shape is (N, C, H, W) or (N, F)."""
        if len(shape) != 4 or self is Layout.NCHW:
            return shape
        n, c, h, w = shape
        return (n, h, w, c)


@dataclass(frozen=True)
class WeightSpec:
    """One weight of an op: its role, shape, layout and kind, as the manifest names them.

    storage: the format that it is kept in; empty where the precision says which. limit: the largest
    magnitude of an integer; 0 where its format is the limit. positive: it is finite and above 0.
    """

    role: str  # weight, bias, running_mean, running_var
    shape: Shape
    layout: str  # OIHW, OI, O
    kind: str  # conv_weight, bn_param, bn_buffer, fc_weight, fc_bias, conv_bias
    storage: str = ""
    limit: int = 0
    positive: bool = False


@dataclass(frozen=True)
class Op(ABC):
    """An operation. `name` is its term in kernel ids and tables; `arity` counts activations in.

    optional: a backend need not have a kernel of it; plans of float networks do without.
    """

    name: ClassVar[str]
    optional: ClassVar[bool] = False

    @property
    def arity(self) -> int:
        return 1

    @property
    def of_pixels(self) -> bool:
        """Whether its input is pixels as decoders give them: bytes, in memory NHWC."""
        return False

    @property
    def parts(self) -> tuple[Op, ...]:
        """The ops that it computes one after the other, if it is made of several."""
        return ()

    @abstractmethod
    def infer(self, *inputs: Shape) -> Shape:
        """The output shape for these input shapes; raises `ShapeError`."""

    def weights(self) -> tuple[WeightSpec, ...]:
        """The weights it reads, in the order in which kernels are given them."""
        return ()

    @property
    def input_storage(self) -> tuple[str, ...]:
        """The storage format of each input; empty where it is the precision's."""
        return ("",) * self.arity

    @property
    def output_storage(self) -> str:
        """The storage format of the output; empty where it is the precision's."""
        return ""

    def macs(self, *inputs: Shape) -> int:
        """Multiply-accumulates; 0 for everything but convolution and linear, as is usual."""
        return 0

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        """The elements of each input that are read; strides may leave gaps between windows."""
        return tuple(map(math.prod, inputs))

    @property
    def extras(self) -> Mapping[str, str]:
        """What it asks beyond what every kernel of its op computes: by the field's name, its value.

        Of a convolution `groups` and `dilation`, unless they are 1. A kernel that computes them
        says so (`Kernel.extras`); all others refuse the problem.
        """
        return {}

    @property
    def settings(self) -> Mapping[str, object]:
        """Its fields by name, as tables, records and findings name a problem."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def label(self) -> str:
        """The name with what is fused into it: `conv2d+bias+residual+relu`."""
        return self.name

    def _check(self, inputs: tuple[Shape, ...], ndim: int | None = 4) -> None:
        if len(inputs) != self.arity:
            raise ShapeError(f"{self.label} takes {self.arity} input(s), got {len(inputs)}")
        for shape in inputs:
            if ndim is not None and len(shape) != ndim:
                raise ShapeError(f"{self.label} takes {ndim}-d inputs, got shape {shape}")
            if any(d < 1 for d in shape):
                raise ShapeError(f"{self.label}: every extent must be at least 1, got {shape}")
            check_size(shape)

    def _set_counts(self, *names: str) -> None:
        """Make these fields ints; raises `ShapeError` for one below 1."""
        for name in names:
            value = as_int(getattr(self, name), f"{self.name}: {name}")
            if value < 1:
                raise ShapeError(f"{self.name}: {name} must be at least 1, got {value}")
            object.__setattr__(self, name, value)

    def _set_window(self, *more: str) -> None:
        """Make kernel_size, stride and padding pairs; one number stands for both, as in PyTorch.

        more: further pairs of at least 1.
        """
        least_of = {"kernel_size": 1, "stride": 1, "padding": 0, **dict.fromkeys(more, 1)}
        for name, least in least_of.items():
            given = getattr(self, name)
            if _is_pair(given) and min(given) >= least:
                continue
            try:
                pair = given if isinstance(given, tuple | list) else (given, given)
                pair = tuple([as_int(extent, name) for extent in pair])
            except ShapeError:
                pair = ()
            if len(pair) != 2 or min(pair) < least:
                raise ShapeError(
                    f"{self.name}: {name} must be an integer ≥ {least} or two of them, "
                    f"got {show(given)}"
                )
            object.__setattr__(self, name, pair)

    def _check_flags(self, *names: str) -> None:
        """Raise `ShapeError` for a flag that is no bool, such as an argument in its place."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ShapeError(f"{self.name}: {name} must be True or False, got {show(value)}")


def _is_pair(value: object) -> bool:
    """Whether it is two plain ints already: problems are made by the thousand from others."""
    return type(value) is tuple and [type(extent) for extent in value] == [int, int]


def _window(
    extent: int, kernel: int, stride: int, padding: int, what: str, dilation: int = 1
) -> int:
    """⌊(extent + 2·padding − span) / stride⌋ + 1, or `ShapeError` when no window fits.

    span: dilation·(kernel − 1) + 1, the pixels from the first tap of a window to its last.
    """
    span = dilation * (kernel - 1) + 1
    out = (extent + 2 * padding - span) // stride + 1
    if out < 1:
        dilated = "" if dilation == 1 else f" (of {kernel} taps, {dilation} apart)"
        raise ShapeError(
            f"{what}: a window of {span}{dilated} does not fit an extent of {extent} padded by "
            f"{padding}"
        )
    return out


def covered_by(windows: tuple[Conv2d | MaxPool2d, ...], image: Shape) -> int:
    """The elements of (N, C, H, W) that windows over windows read, the first over the image."""
    count = image[0] * image[1]
    for axis in (0, 1):
        extents = [image[2 + axis]]
        for op in windows:
            along = op.kernel_size[axis], op.stride[axis], op.padding[axis]
            extents.append(_window(extents[-1], *along, op.name, _dilation(op)[axis]))
        read = set(range(extents.pop()))
        for op in reversed(windows):  # from the output back
            starts = [i * op.stride[axis] - op.padding[axis] for i in read]
            offsets = range(0, op.kernel_size[axis] * _dilation(op)[axis], _dilation(op)[axis])
            taps = {start + offset for start in starts for offset in offsets}
            read = taps & set(range(extents.pop()))
        count *= len(read)
    return count


def _dilation(op: Conv2d | MaxPool2d) -> tuple[int, int]:
    return op.dilation if isinstance(op, Conv2d) else (1, 1)


@dataclass(frozen=True)
class Conv2d(Op):
    """Cross-correlation with zero padding, and what is fused into its epilogue.

    y = act(conv(x, w) + bias + residual): `bias` adds one value per output channel, `residual`
    adds a second input of the output's shape, `relu` clamps at zero, in this order. An int for
    kernel_size, stride, padding or dilation stands for both axes.

    groups:   both kinds of channels are split into as many runs, and each run of outputs reads the
              run of inputs of the same number alone. They divide both.
    dilation: pixels from one tap of a window to the next.
    """

    name: ClassVar[str] = "conv2d"

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    bias: bool = False
    residual: bool = False
    relu: bool = False
    groups: int = 1
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        self._set_counts("in_channels", "out_channels", "groups")
        self._set_window("dilation")
        self._check_flags("bias", "residual", "relu")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ShapeError(
                f"{self.name}: {self.groups} groups do not divide {self.in_channels} channels into "
                f"{self.out_channels}"
            )

    @property
    def arity(self) -> int:
        return 2 if self.residual else 1

    @property
    def extras(self) -> Mapping[str, str]:
        asked = {"groups": self.groups != 1, "dilation": self.dilation != (1, 1)}
        return {name: _short(getattr(self, name)) for name, used in asked.items() if used}

    @property
    def settings(self) -> Mapping[str, object]:
        """Without groups and dilation of 1: names of problems are older than these fields."""
        usual = EXTRAS - self.extras.keys()
        return {name: value for name, value in super().settings.items() if name not in usual}

    @property
    def group_channels(self) -> int:
        """Input channels of a group: C/groups."""
        return self.in_channels // self.groups

    @property
    def depth(self) -> int:
        """K, the number of products in each output: C/groups·kh·kw."""
        return self.group_channels * self.kernel_size[0] * self.kernel_size[1]

    @property
    def label(self) -> str:
        fused = [term for term in ("bias", "residual", "relu") if getattr(self, term)]
        return "+".join([self.name, *fused])

    def weights(self) -> tuple[WeightSpec, ...]:
        shape = (self.out_channels, self.group_channels, *self.kernel_size)
        weight = WeightSpec("weight", shape, "OIHW", "conv_weight")
        bias = WeightSpec("bias", (self.out_channels,), "O", "conv_bias")
        return (weight, bias) if self.bias else (weight,)

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        n, c, h, w = inputs[0]
        if c != self.in_channels:
            raise ShapeError(f"{self.label}: expected {self.in_channels} channels, got {inputs[0]}")
        along = zip(self.kernel_size, self.stride, self.padding, strict=True)
        (height, width), (dh, dw) = along, self.dilation
        oh = _window(h, *height, "conv2d height", dh)
        ow = _window(w, *width, "conv2d width", dw)
        out = (n, self.out_channels, oh, ow)
        if self.residual and inputs[1] != out:
            raise ShapeError(f"{self.label}: residual is {inputs[1]}, the output is {out}")
        return out

    def macs(self, *inputs: Shape) -> int:
        return math.prod(self.infer(*inputs)) * self.depth

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        return covered_by((self,), inputs[0]), *map(math.prod, inputs[1:])


@dataclass(frozen=True)
class BatchNorm(Op):
    """Inference batch normalisation over channels: (x − mean) / √(var + eps) · weight + bias."""

    name: ClassVar[str] = "batchnorm"

    channels: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self._set_counts("channels")
        if not (_numbers((self.eps,)) and math.isfinite(self.eps) and self.eps > 0):
            raise ShapeError(f"batchnorm: eps must be positive and finite, got {show(self.eps)}")

    def weights(self) -> tuple[WeightSpec, ...]:
        shape = (self.channels,)
        return (
            WeightSpec("weight", shape, "O", "bn_param"),
            WeightSpec("bias", shape, "O", "bn_param"),
            WeightSpec("running_mean", shape, "O", "bn_buffer"),
            WeightSpec("running_var", shape, "O", "bn_buffer"),
        )

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        if inputs[0][1] != self.channels:
            raise ShapeError(f"batchnorm: expected {self.channels} channels, got {inputs[0]}")
        return inputs[0]


@dataclass(frozen=True)
class ReLU(Op):
    """max(x, 0), elementwise, on any shape."""

    name: ClassVar[str] = "relu"

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs, ndim=None)
        return inputs[0]


@dataclass(frozen=True)
class Add(Op):
    """a + b, elementwise, of equal shapes; with `relu`, max(a + b, 0)."""

    name: ClassVar[str] = "add"

    relu: bool = False

    def __post_init__(self) -> None:
        self._check_flags("relu")

    @property
    def arity(self) -> int:
        return 2

    @property
    def label(self) -> str:
        return "add+relu" if self.relu else "add"

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs, ndim=None)
        if inputs[0] != inputs[1]:
            raise ShapeError(f"{self.label}: shapes differ, {inputs[0]} and {inputs[1]}")
        return inputs[0]


@dataclass(frozen=True)
class MaxPool2d(Op):
    """Maximum over windows; padding never wins, NaN does. Padding is at most half the kernel.

    An int for kernel_size, stride or padding stands for both axes.
    """

    name: ClassVar[str] = "maxpool2d"

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._set_window()
        if any(2 * p > k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            raise ShapeError(
                f"maxpool2d: padding {self.padding} is more than half of kernel "
                f"{self.kernel_size}, so a window could hold padding alone"
            )

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        n, c, h, w = inputs[0]
        oh = _window(h, self.kernel_size[0], self.stride[0], self.padding[0], "maxpool2d height")
        ow = _window(w, self.kernel_size[1], self.stride[1], self.padding[1], "maxpool2d width")
        return (n, c, oh, ow)

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        return (covered_by((self,), inputs[0]),)


@dataclass(frozen=True)
class ConvMaxPool(Op):
    """A convolution and max-pooling; the convolution's result need never be stored.

    The result is that of the two ops one after the other. No fusion level asks for it: a plan
    takes it where the backend has a kernel for it (`r18.runtime.fusing`).
    """

    name: ClassVar[str] = "conv2d_maxpool2d"
    optional: ClassVar[bool] = True

    conv: Conv2d
    pool: MaxPool2d

    def __post_init__(self) -> None:
        if not (isinstance(self.conv, Conv2d) and isinstance(self.pool, MaxPool2d)):
            given = f"{type(self.conv).__name__} and {type(self.pool).__name__}"
            raise ShapeError(f"{self.name} is made of a Conv2d and a MaxPool2d, got {given}")
        if self.conv.residual:
            raise ShapeError(f"{self.name}: the convolution takes no residual, got {self.label}")

    @property
    def parts(self) -> tuple[Op, ...]:
        return self.conv, self.pool

    @property
    def extras(self) -> Mapping[str, str]:
        return self.conv.extras

    @property
    def label(self) -> str:
        return f"{self.conv.label}+{self.pool.label}"

    def weights(self) -> tuple[WeightSpec, ...]:
        return self.conv.weights()

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        return self.pool.infer(self.conv.infer(*inputs))

    def macs(self, *inputs: Shape) -> int:
        self.infer(*inputs)
        return self.conv.macs(*inputs)

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        return (covered_by((self.conv, self.pool), inputs[0]),)


@dataclass(frozen=True)
class ConvProjection(Op):
    """A convolution whose residual is the projection of a second input, by a convolution too.

    y = act(conv(x, w) + bias + projection(z, v) + projection's bias): the last convolution of a
    block and its projection shortcut (He et al., arXiv:1512.03385, §3.3) as one sum. Its inputs
    are x and z; its weights are the convolution's and then the projection's. No fusion level asks
    for it: a plan takes it where the backend has a kernel for it (`r18.runtime.fusing`).

    conv:       with `residual`, which is what the projection makes.
    projection: as many output channels, without residual and ReLU.
    """

    name: ClassVar[str] = "conv2d_projection"
    optional: ClassVar[bool] = True

    conv: Conv2d
    projection: Conv2d

    def __post_init__(self) -> None:
        if not (isinstance(self.conv, Conv2d) and isinstance(self.projection, Conv2d)):
            given = f"{type(self.conv).__name__} and {type(self.projection).__name__}"
            raise ShapeError(f"{self.name} is made of two Conv2d, got {given}")
        if not self.conv.residual:
            raise ShapeError(f"{self.name}: the convolution adds a residual, got {self.conv.label}")
        if self.projection.residual or self.projection.relu:
            raise ShapeError(
                f"{self.name}: the projection has neither residual nor ReLU, "
                f"got {self.projection.label}"
            )
        if self.conv.out_channels != self.projection.out_channels:
            raise ShapeError(
                f"{self.name}: convolution and projection have as many output channels, got "
                f"{self.conv.out_channels} and {self.projection.out_channels}"
            )

    @property
    def arity(self) -> int:
        return 2

    @property
    def parts(self) -> tuple[Op, ...]:
        return self.projection, self.conv

    @property
    def relu(self) -> bool:
        return self.conv.relu

    @property
    def depth(self) -> int:
        """K, the number of products in each output, of both convolutions."""
        return self.conv.depth + self.projection.depth

    @property
    def extras(self) -> Mapping[str, str]:
        return {**self.projection.extras, **self.conv.extras}

    @property
    def label(self) -> str:
        return f"{self.conv.label}+{self.projection.label}"

    def weights(self) -> tuple[WeightSpec, ...]:
        of_projection = (
            replace(spec, role=f"projection_{spec.role}") for spec in self.projection.weights()
        )
        return (*self.conv.weights(), *of_projection)

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        x, z = inputs
        return self.conv.infer(x, self.projection.infer(z))

    def macs(self, *inputs: Shape) -> int:
        self.infer(*inputs)
        x, z = inputs
        return self.conv.macs(x, self.projection.infer(z)) + self.projection.macs(z)

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        return covered_by((self.conv,), inputs[0]), covered_by((self.projection,), inputs[1])


@dataclass(frozen=True)
class GlobalAvgPool(Op):
    """The mean over height and width: (N, C, H, W) → (N, C)."""

    name: ClassVar[str] = "gap"

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        return inputs[0][:2]


@dataclass(frozen=True)
class Linear(Op):
    """x · wᵀ + bias: (N, in_features) → (N, out_features)."""

    name: ClassVar[str] = "linear"

    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        self._set_counts("in_features", "out_features")

    def weights(self) -> tuple[WeightSpec, ...]:
        return (
            WeightSpec("weight", (self.out_features, self.in_features), "OI", "fc_weight"),
            WeightSpec("bias", (self.out_features,), "O", "fc_bias"),
        )

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs, ndim=2)
        n, features = inputs[0]
        if features != self.in_features:
            raise ShapeError(f"linear: expected {self.in_features} features, got {inputs[0]}")
        return (n, self.out_features)

    def macs(self, *inputs: Shape) -> int:
        return math.prod(self.infer(*inputs)) * self.in_features


@dataclass(frozen=True)
class MatMul(Op):
    """x · wᵀ: (N, in_features) → (N, out_features), a linear layer without its bias.

    No network holds it: it is what functions like `torch.matmul` compute.
    """

    name: ClassVar[str] = "matmul"
    optional: ClassVar[bool] = True

    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        self._set_counts("in_features", "out_features")

    def weights(self) -> tuple[WeightSpec, ...]:
        shape = (self.out_features, self.in_features)
        return (WeightSpec("weight", shape, "OI", "fc_weight"),)

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs, ndim=2)
        n, features = inputs[0]
        if features != self.in_features:
            raise ShapeError(f"matmul: expected {self.in_features} features, got {inputs[0]}")
        return (n, self.out_features)

    def macs(self, *inputs: Shape) -> int:
        return math.prod(self.infer(*inputs)) * self.in_features


@dataclass(frozen=True)
class AvgPoolLinear(Op):
    """Global average pooling and the linear layer of its means, which need never be stored.

    The result is that of the two ops one after the other. No fusion level asks for it: a plan
    takes it where the backend has a kernel for it (`r18.runtime.fusing`).
    """

    name: ClassVar[str] = "gap_linear"
    optional: ClassVar[bool] = True

    linear: Linear

    def __post_init__(self) -> None:
        if not isinstance(self.linear, Linear):
            raise ShapeError(f"{self.name} takes a Linear, got {show(self.linear)}")

    @property
    def parts(self) -> tuple[Op, ...]:
        return GlobalAvgPool(), self.linear

    @property
    def label(self) -> str:
        return "+".join(part.label for part in self.parts)

    def weights(self) -> tuple[WeightSpec, ...]:
        return self.linear.weights()

    def infer(self, *inputs: Shape) -> Shape:
        return self.linear.infer(GlobalAvgPool().infer(*inputs))

    def macs(self, *inputs: Shape) -> int:
        return self.linear.macs(GlobalAvgPool().infer(*inputs))


@dataclass(frozen=True)
class Softmax(Op):
    """exp(x − max) / Σ exp(x − max) over the last axis of (N, F)."""

    name: ClassVar[str] = "softmax"

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs, ndim=2)
        return inputs[0]


@dataclass(frozen=True)
class Relayout(Op):
    """The same tensor in another memory layout.

    No network contains it: the executor plans one where a kernel's layout differs from the layout
    of what it reads, so that layout changes are steps that can be seen and timed.
    """

    name: ClassVar[str] = "relayout"

    source: Layout
    target: Layout

    def __post_init__(self) -> None:
        for layout in (self.source, self.target):
            if not isinstance(layout, Layout):
                raise ShapeError(
                    f"relayout: source and target are of r18.graph.ops.Layout, got {show(layout)}"
                )

    @property
    def label(self) -> str:
        return f"relayout {self.source.value}→{self.target.value}"

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        return inputs[0]


@dataclass(frozen=True)
class Normalize(Op):
    """Pixels into what networks take: (x / 255 − mean) / std, channel by channel, of bytes x.

    No network holds it; `CompileOptions.pixels` puts it in front.
    """

    name: ClassVar[str] = "normalize"
    optional: ClassVar[bool] = True

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not _numbers(value):
                raise ShapeError(f"normalize: {name} must be a tuple of numbers, got {show(value)}")
            object.__setattr__(self, name, tuple(value))
        if not self.mean or len(self.mean) != len(self.std):
            raise ShapeError(
                f"normalize: mean and std are one number a channel each, got {len(self.mean)} "
                f"and {len(self.std)}"
            )
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ShapeError(
                f"normalize: mean must be finite, std finite and positive, got mean {self.mean} "
                f"and std {self.std}"
            )

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def of_pixels(self) -> bool:
        return True

    @property
    def input_storage(self) -> tuple[str, ...]:
        return ("uint8",)

    @property
    def scale_shift(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The form x·scale + shift, by channel: 1 / (255·std) and −mean / std, in float64."""
        scale = tuple(1 / (255 * std) for std in self.std)
        return scale, tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        if inputs[0][1] != self.channels:
            raise ShapeError(f"normalize: expected {self.channels} channels, got {inputs[0]}")
        return inputs[0]


OPS: dict[str, type[Op]] = {
    op.name: op
    for op in (
        *(Conv2d, BatchNorm, ReLU, Add, MaxPool2d, GlobalAvgPool, Linear, Softmax, Relayout),
        *(ConvMaxPool, ConvProjection, AvgPoolLinear, Normalize, MatMul),
    )
}


@dataclass(frozen=True)
class Problem:
    """An op with concrete input shapes: what a kernel is asked to do.

    Raises `ShapeError` for shapes that the op does not take, that hold anything but integers, or
    whose tensors no memory can hold.
    """

    op: Op
    inputs: tuple[Shape, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.op, Op):
            raise ShapeError(f"a problem is of an op of r18.graph.ops, got {show(self.op)}")
        if not isinstance(self.inputs, tuple | list):
            raise ShapeError(f"inputs must be a tuple of shapes, got {show(self.inputs)}")
        what = f"{self.op.label}: the shape of an input"
        object.__setattr__(self, "inputs", tuple([as_shape(s, what) for s in self.inputs]))
        for shape in (self.output, *(spec.shape for spec in self.op.weights())):
            check_size(shape)

    @cached_property
    def output(self) -> Shape:
        return self.op.infer(*self.inputs)

    @property
    def macs(self) -> int:
        return self.op.macs(*self.inputs)

    @property
    def batch(self) -> int:
        """The first extent; 1 for a scalar, which has none."""
        return self.inputs[0][0] if self.inputs[0] else 1

    def __str__(self) -> str:
        ins = ", ".join("×".join(map(str, s)) for s in self.inputs)
        out = "×".join(map(str, self.output))
        return f"{self.op.label}({_settings(self.op)}) {ins} → {out}"


@lru_cache(maxsize=1024)  # the oracle asks for those of one problem hundreds of times
def parts_of(problem: Problem) -> tuple[Problem, ...]:
    """The problems of an op's parts, in the order in which they are computed.

    Each reads what the one before it makes: of a `ConvMaxPool` the convolution and the pooling, of
    an `AvgPoolLinear` the pooling and the linear layer. Of a `ConvProjection` they are the
    projection, and the convolution that adds what it makes. Raises `ShapeError` for an op without
    parts.
    """
    if not problem.op.parts:
        raise ShapeError(f"{problem.op.label} has no parts: it is one op")
    if isinstance(problem.op, ConvProjection):
        x, z = problem.inputs
        projection = Problem(problem.op.projection, (z,))
        return projection, Problem(problem.op.conv, (x, projection.output))
    found: list[Problem] = []
    for part in problem.op.parts:
        found.append(Problem(part, (found[-1].output,) if found else problem.inputs))
    return tuple(found)


def _settings(op: Op) -> str:
    """What the label does not say; of ops in an op, one after the other."""
    values = op.settings
    parts = [_settings(value) for value in values.values() if isinstance(value, Op)]
    own = ", ".join(
        f"{name}={_short(value)}"
        for name, value in values.items()
        if name not in ("bias", "residual", "relu") and not isinstance(value, Op | None)
    )
    return "; ".join(part for part in (*parts, own) if part)


def _numbers(values: Collection[object]) -> bool:
    """Looks at each type once: a problem may have tens of thousands of channels."""
    kinds = set(map(type, values))
    return all(kind is not bool and issubclass(kind, numbers.Real) for kind in kinds)


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "×".join(map(str, value))
    return value.value if isinstance(value, Layout) else str(value)
