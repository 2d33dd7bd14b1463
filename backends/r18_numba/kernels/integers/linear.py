"""x·wᵀ + bias of integers, to float32, by square tiles in shared memory, one thread per output."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.integers.requantize import product
from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, i32, index = np.float32, np.int32, np.int64


@cache
def build(side: int, depth: int) -> Any:
    """out (rows, outputs) float32 of x (rows, features), w (outputs, features) int8, bias int32 and
    multiplier (outputs).

    Blocks have side × side threads: x indexes outputs, y rows. depth: features in shared memory at
    a time, a multiple of the side.
    """
    pitch = depth + 1  # so that the threads of a warp read from different banks

    @kernel()
    def tiled_qlinear(x, w, bias, multiplier, out, rows, features, outputs):  # type: ignore[no-untyped-def]
        tile_x = cuda.shared.array((side, pitch), i32)
        tile_w = cuda.shared.array((side, pitch), i32)
        across, down = cuda.threadIdx.x & 1023, cuda.threadIdx.y & 1023
        row = cuda.blockIdx.y * side + down
        output = cuda.blockIdx.x * side + across
        loaded = cuda.blockIdx.x * side + down  # the output whose weights this thread loads
        acc = i32(0)
        for first in range(0, features, depth):
            for k in range(across, depth, side):
                at = first + k
                tile_x[down, k] = i32(0)
                tile_w[down, k] = i32(0)
                if row < rows and at < features:
                    tile_x[down, k] = i32(x[np.uint64(index(row) * features + at)])
                if loaded < outputs and at < features:
                    tile_w[down, k] = i32(w[np.uint64(index(loaded) * features + at)])
            cuda.syncthreads()
            for k in range(depth):
                acc = i32(acc + i32(tile_x[down, k] * tile_w[across, k]))
            cuda.syncthreads()
        if row < rows and output < outputs:
            acc = i32(acc + bias[np.uint64(output)])
            number = product(f32(acc), multiplier[np.uint64(output)])
            out[np.uint64(index(row) * outputs + output)] = number

    return tiled_qlinear
