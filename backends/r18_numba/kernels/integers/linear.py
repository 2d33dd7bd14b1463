"""x·wᵀ + bias of integers, to float32, by square tiles in shared memory, one thread per output."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.integers.requantize import product
from r18_numba.kernels.jit import kernel
from r18_numba.kernels.ops.linear import build_sum
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, i32, index = np.float32, np.int32, np.int64


@cache
def build(side: int, depth: int) -> Any:
    """out (rows, outputs) float32 of x (rows, features), w (outputs, features) int8, bias int32 and
    multiplier (outputs).

    side, depth: as of `build_sum`; the x of a thread indexes outputs, its y rows.
    """
    tile_sum = build_sum(side, depth, i32)

    @kernel()
    def tiled_qlinear(x, w, bias, multiplier, out, rows, features, outputs):  # type: ignore[no-untyped-def]
        across, down = cuda.threadIdx.x & 1023, cuda.threadIdx.y & 1023
        row, output = cuda.blockIdx.y * side + down, cuda.blockIdx.x * side + across
        acc = tile_sum(x, w, rows, features, outputs, row, across, down)
        if row < rows and output < outputs:
            acc = i32(acc + bias[np.uint64(output)])
            number = product(f32(acc), multiplier[np.uint64(output)])
            out[np.uint64(index(row) * outputs + output)] = number

    return tiled_qlinear
