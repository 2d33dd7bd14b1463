"""Global average pooling of integers, in either layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from r18.graph.ops import Problem
from r18.graph.quantized import QuantizedGlobalAvgPool
from r18_cupy.bytes.gap import ByteGap
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Argument, Pointer, Role
from r18_cupy.integers.kernel import BYTES, IntegerKernel, ends


@dataclass(frozen=True, eq=False)
class QuantizedGap(IntegerKernel, ByteGap):
    """Sums in int32."""

    op = QuantizedGlobalAvgPool

    def entry(self, stored: str) -> Entry:
        return Entry("integers/gap", f"qgap_{self.layout.value}", (("BYTE", BYTES[stored]),))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def entry_of(self, problem: Problem) -> Entry:
        return self.entry(cast(QuantizedGlobalAvgPool, problem.op).stored)

    def multiplier(self) -> tuple[Argument, ...]:
        return (Pointer(Role.WEIGHT),)

    def ends(self, problem: Problem) -> tuple[Argument, ...]:
        return ends(cast(QuantizedGlobalAvgPool, problem.op).output_storage)
