"""Max-pooling of integers, in either layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from r18.graph.ops import MaxPool2d, Problem
from r18.graph.quantized import QuantizedMaxPool2d
from r18_cupy.bytes.maxpool2d import ByteMaxPool
from r18_cupy.cuda.compiler import Entry
from r18_cupy.integers.kernel import BYTES, IntegerKernel


@dataclass(frozen=True, eq=False)
class QuantizedMaxPool(IntegerKernel, ByteMaxPool):
    """See kernels/integers/maxpool2d.cu."""

    op = QuantizedMaxPool2d

    def entry(self, stored: str) -> Entry:
        symbol = f"qmaxpool2d_{self.layout.value}"
        return Entry("integers/maxpool2d", symbol, (("BYTE", BYTES[stored]),))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, BYTES))

    def entry_of(self, problem: Problem) -> Entry:
        return self.entry(cast(QuantizedMaxPool2d, problem.op).stored)

    def pool_of(self, problem: Problem) -> MaxPool2d:
        return cast(QuantizedMaxPool2d, problem.op).pool
