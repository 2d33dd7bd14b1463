"""x·wᵀ + bias by square tiles in shared memory, one thread per output."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r18_numba.kernels.jit import function, kernel
from r18_numba.target import numba_cuda

cuda = numba_cuda()
f32, index = np.float32, np.int64


@cache
def build_sum(side: int, depth: int, number: Any) -> Any:
    """Σ_k x[row, k]·w[output, k] of each thread of a block, in `number`: float32 or int32.

    x (rows, features), w (outputs, features). Blocks have side × side threads. depth: features in
    shared memory at a time, a multiple of the side. Returns 0 outside the rows and outputs.
    """
    pitch = depth + 1  # so that the threads of a warp read from different banks

    @function()
    def tile_sum(x, w, rows, features, outputs, row, across, down):  # type: ignore[no-untyped-def]
        tile_x = cuda.shared.array((side, pitch), number)
        tile_w = cuda.shared.array((side, pitch), number)
        loaded = cuda.blockIdx.x * side + down  # the output whose weights this thread loads
        total = number(0)
        for first in range(0, features, depth):
            for k in range(across, depth, side):
                at = first + k
                tile_x[down, k] = number(0)
                tile_w[down, k] = number(0)
                if row < rows and at < features:
                    tile_x[down, k] = number(x[np.uint64(index(row) * features + at)])
                if loaded < outputs and at < features:
                    tile_w[down, k] = number(w[np.uint64(index(loaded) * features + at)])
            cuda.syncthreads()
            for k in range(depth):
                # Numba computes int32 in int64; the conversions keep the low 32 bits.
                total = number(total + number(tile_x[down, k] * tile_w[across, k]))
            cuda.syncthreads()
        return total

    return tile_sum


@cache
def build(side: int, depth: int, storage: Any) -> Any:
    """out (rows, outputs) of x (rows, features), w (outputs, features), bias (outputs) float32.

    side, depth: as of `build_sum`; the x of a thread indexes outputs, its y rows.
    """
    tile_sum = build_sum(side, depth, f32)

    @kernel()
    def tiled_linear(x, w, bias, out, rows, features, outputs):  # type: ignore[no-untyped-def]
        across, down = cuda.threadIdx.x & 1023, cuda.threadIdx.y & 1023
        row, output = cuda.blockIdx.y * side + down, cuda.blockIdx.x * side + across
        total = tile_sum(x, w, rows, features, outputs, row, across, down)
        if row < rows and output < outputs:
            total += bias[np.uint64(output)]
            out[np.uint64(index(row) * outputs + output)] = storage(total)

    return tiled_linear
