"""The linear op of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from r18.graph.ops import Problem
from r18.graph.quantized import QuantizedLinear
from r18_numba.integers.kernel import IntegerKernel
from r18_numba.kernel import Arrays, ceil_div
from r18_numba.others import LinearKernel


class QuantizedLinearKernel(IntegerKernel, LinearKernel):
    """Square tiles of outputs, one output per thread."""

    op = QuantizedLinear  # type: ignore[assignment]  # its sizes are those of the problem

    def launch(self, problem: Problem, arrays: Arrays, stream: Any) -> None:
        from r18_numba.kernels.integers import linear

        (rows, features), (_, outputs) = problem.inputs[0], problem.output
        stream.launch(
            linear.build(self.side, self.depth),
            (ceil_div(outputs, self.side), ceil_div(rows, self.side), 1),
            (self.side, self.side, 1),
            *(arrays.inputs[0], arrays.weight(0, np.int8), arrays.weight(1, np.int32)),
            *(arrays.weight(2, np.float32), arrays.out, rows, features, outputs),
        )
