"""x·wᵀ + bias by square tiles in shared memory, one thread per output."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.jit import kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, index = np.float32, np.int64


@cache
def build(side: int, depth: int, storage: Any) -> Any:
    """out (rows, outputs) of x (rows, features), w (outputs, features), bias (outputs) float32.

    Blocks have side × side threads: x indexes outputs, y rows. depth: features in shared memory at
    a time, a multiple of the side.
    """
    pitch = depth + 1  # so that the threads of a warp read from different banks

    @kernel()
    def tiled_linear(x, w, bias, out, rows, features, outputs):  # type: ignore[no-untyped-def]
        tile_x = cuda.shared.array((side, pitch), f32)
        tile_w = cuda.shared.array((side, pitch), f32)
        across, down = cuda.threadIdx.x & 1023, cuda.threadIdx.y & 1023
        row = cuda.blockIdx.y * side + down
        output = cuda.blockIdx.x * side + across
        loaded = cuda.blockIdx.x * side + down  # the output whose weights this thread loads
        total = f32(0)
        for first in range(0, features, depth):
            for k in range(across, depth, side):
                at = first + k
                tile_x[down, k] = f32(0)
                tile_w[down, k] = f32(0)
                if row < rows and at < features:
                    tile_x[down, k] = f32(x[np.uint64(index(row) * features + at)])
                if loaded < outputs and at < features:
                    tile_w[down, k] = f32(w[np.uint64(index(loaded) * features + at)])
            cuda.syncthreads()
            for k in range(depth):
                total += tile_x[down, k] * tile_w[across, k]
            cuda.syncthreads()
        if row < rows and output < outputs:
            total += bias[np.uint64(output)]
            out[np.uint64(index(row) * outputs + output)] = storage(total)

    return tiled_linear
