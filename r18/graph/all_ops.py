"""Every op by its name: of numbers, of integers and of scaled numbers."""

from __future__ import annotations

from r18.graph.ops import OPS, Op
from r18.graph.quantized import QUANTIZED_OPS
from r18.graph.scaled import SCALED_OPS

ALL_OPS: dict[str, type[Op]] = OPS | {op.name: op for op in (*QUANTIZED_OPS, *SCALED_OPS)}

__all__ = ["ALL_OPS"]
