"""A right backend whose plans name a tile of a kernel, as a tuning table may."""

from __future__ import annotations

from choosing_toy import Named
from faulty_backends import Right, right
from r18.backend import Fastest, Kernel, Preferred, RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32

TILE = Named(
    "faulty",
    Conv2d,
    "plain",
    FP32,
    RoundingContract("sum", "float32", "float32"),
    run=right,
    part="m64n64",
)  # of the convolution of `Right`


class Tiled(Right):
    """A backend whose table says that one tile is fastest for every convolution."""

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        return (TILE,) if kernel.id == TILE.variant_of else ()

    def variant(self, kernel: Kernel, problem: Problem) -> Kernel | None:
        return TILE if kernel.id == TILE.variant_of else None

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        return Preferred(TILE.id) if isinstance(problem.op, Conv2d) else None
