"""Direct convolution of e4m3 numbers: the plain baseline, in either layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from r18.backend import RoundingContract
from r18.graph.ops import Problem
from r18.graph.scaled import ScaledConv2d
from r18_cupy.bytes.conv import ByteDirect
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import Argument
from r18_cupy.float8.kernel import Float8Kernel, factors, plain_sum


@dataclass(frozen=True, eq=False)
class ScaledDirect(Float8Kernel, ByteDirect):
    """Sums in float32."""

    op = ScaledConv2d

    @property
    def contract(self) -> RoundingContract:
        return plain_sum()

    def entries(self) -> tuple[Entry, ...]:
        return (Entry("float8/direct", f"sconv2d_direct_{self.layout.value}"),)

    def entry_of(self, problem: Problem) -> Entry:
        (entry,) = self.entries()
        return entry

    def factors(self, problem: Problem) -> tuple[Argument, ...]:
        return factors(cast(ScaledConv2d, problem.op))
