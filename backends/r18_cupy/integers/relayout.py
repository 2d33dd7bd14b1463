"""Layout changes of a quantised network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from r18.graph.ops import Problem
from r18.graph.quantized import QuantizedRelayout
from r18_cupy.bytes.relayout import BYTE, ByteTranspose, transposing
from r18_cupy.cuda.compiler import Entry
from r18_cupy.integers.kernel import IntegerKernel

BITS = {"uint8": BYTE, "int8": BYTE, "float32": "unsigned"}
"""C++ types of their size."""


@dataclass(frozen=True, eq=False)
class QuantizedTranspose(IntegerKernel, ByteTranspose):
    """The transpose of integer tensors, and of float32 images."""

    op = QuantizedRelayout

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(transposing, dict.fromkeys(BITS.values())))

    def entry_of(self, problem: Problem) -> Entry:
        return transposing(BITS[cast(QuantizedRelayout, problem.op).stored])
