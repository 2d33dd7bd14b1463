"""Base classes of the quantised and the scaled forms of an op, which have the op's shapes.

A form holds the op of numbers as `conv` or `linear`, and says what is stored and which factors it
multiplies by. See `r18.graph.quantized` and `r18.graph.scaled`.
"""

from __future__ import annotations

from collections.abc import Mapping

from r18.graph.ops import Conv2d, Linear, MaxPool2d, Op, Shape, WeightSpec, covered_by


class ConvForm(Op):
    """The form of a convolution."""

    conv: Conv2d

    @property
    def arity(self) -> int:
        return self.conv.arity

    @property
    def extras(self) -> Mapping[str, str]:
        return self.conv.extras

    def infer(self, *inputs: Shape) -> Shape:
        return self.conv.infer(*inputs)

    def macs(self, *inputs: Shape) -> int:
        return self.conv.macs(*inputs)

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        return self.conv.covered(*inputs)


class LinearForm(Op):
    """The form of a linear layer."""

    linear: Linear

    def infer(self, *inputs: Shape) -> Shape:
        return self.linear.infer(*inputs)

    def macs(self, *inputs: Shape) -> int:
        return self.linear.macs(*inputs)


class ConvMaxPoolForm(Op):
    """The form of a convolution and max-pooling, as one op.

    image: where it is given, it makes what the convolution reads; its weight is the last one.
    """

    conv: ConvForm
    pool: MaxPool2d
    image: Op | None

    @property
    def extras(self) -> Mapping[str, str]:
        return self.conv.extras

    @property
    def label(self) -> str:
        image = "" if self.image is None else f"{self.image.label}+"
        return f"{image}{self.conv.label}+{self.pool.label}"

    @property
    def input_storage(self) -> tuple[str, ...]:
        return self.parts[0].input_storage

    def weights(self) -> tuple[WeightSpec, ...]:
        more = () if self.image is None else self.image.weights()
        return (*self.conv.weights(), *more)

    def infer(self, *inputs: Shape) -> Shape:
        self._check(inputs)
        return self.pool.infer(self.conv.infer(*inputs))

    def macs(self, *inputs: Shape) -> int:
        self.infer(*inputs)
        return self.conv.macs(*inputs)

    def covered(self, *inputs: Shape) -> tuple[int, ...]:
        return (covered_by((self.conv.conv, self.pool), inputs[0]),)


class AvgPoolLinearForm(Op):
    """The form of global average pooling and a linear layer of its means, as one op of two
    parts."""

    @property
    def label(self) -> str:
        return "+".join(part.label for part in self.parts)

    @property
    def input_storage(self) -> tuple[str, ...]:
        return self.parts[0].input_storage

    @property
    def output_storage(self) -> str:
        return self.parts[1].output_storage

    def infer(self, *inputs: Shape) -> Shape:
        gap, linear = self.parts
        return linear.infer(gap.infer(*inputs))

    def macs(self, *inputs: Shape) -> int:
        gap, linear = self.parts
        return linear.macs(gap.infer(*inputs))


def factor(role: str, shape: Shape) -> WeightSpec:
    """A weight that an epilogue multiplies by."""
    return WeightSpec(role, shape, "O", role, "float32", positive=True)


__all__ = ["AvgPoolLinearForm", "ConvForm", "ConvMaxPoolForm", "LinearForm", "factor"]
