"""Every op by its name, and ops that are alike: of numbers, of integers and of scaled numbers."""

from __future__ import annotations

from r18.graph.ops import OPS, AvgPoolLinear, ConvMaxPool, ConvProjection, Op
from r18.graph.quantized import QUANTIZED_OPS, QuantizedAvgPoolLinear, QuantizedConvMaxPool
from r18.graph.scaled import SCALED_OPS, ScaledAvgPoolLinear, ScaledConvMaxPool

ALL_OPS: dict[str, type[Op]] = OPS | {op.name: op for op in (*QUANTIZED_OPS, *SCALED_OPS)}

STEMS: tuple[type[Op], ...] = (ConvMaxPool, QuantizedConvMaxPool, ScaledConvMaxPool)
"""A convolution and its max-pooling as one op."""
CLASSIFIERS: tuple[type[Op], ...] = (AvgPoolLinear, QuantizedAvgPoolLinear, ScaledAvgPoolLinear)
"""Global average pooling and its linear layer as one op."""

SHORTCUTS: tuple[type[Op], ...] = (ConvProjection,)
"""A block's last convolution and its projection shortcut as one op."""

__all__ = ["ALL_OPS", "CLASSIFIERS", "SHORTCUTS", "STEMS"]
