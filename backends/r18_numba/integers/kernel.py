"""The base class of kernels of quantised ops, and their saturation limits."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from r18.graph.ops import Problem
from r18_numba.kernel import NumbaKernel


class IntegerKernel(NumbaKernel):
    """A kernel of a quantised op."""

    arithmetic: ClassVar[str] = "integer"


def ends(problem: Problem) -> tuple[int, int]:
    """The lowest and highest value of the output's storage format, at which outputs saturate."""
    limits = np.iinfo(problem.op.output_storage)
    return int(limits.min), int(limits.max)
