"""Direct convolution through shared memory. NCHW. See kernels/conv/direct_tiled.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from r18.backend import Array
from r18.graph.ops import Conv2d, Problem
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div

# A block's output tile; each thread computes 4 rows of 8 channels.
TILE_H, TILE_W, TILE_O = 8, 8, 32
TILE_THREADS = TILE_H * TILE_W * TILE_O // (4 * 8)
MAX_SHARED_NBYTES = 48 * 1024  # per block, on every architecture without opting in
WANTED_SHARED_NBYTES = 16 * 1024  # leaves room for several blocks per SM
MAX_CHANNELS = 8
ITEMSIZE = 4  # float32, as everything is stored in shared memory


@dataclass(frozen=True)
class Staging:
    """The part of a problem that a block of `DirectTiled` has in shared memory at a time.

    channels: input channels; window_rows: rows of the window. All rows, or one channel.
    """

    channels: int
    window_rows: int

    def nbytes(self, op: Conv2d) -> int:
        """Bytes of the weights, and of the input tile with its halo."""
        kw, (sh, sw) = op.kernel_size[1], op.stride
        weights = self.window_rows * kw * TILE_O
        halo = ((TILE_H - 1) * sh + self.window_rows) * ((TILE_W - 1) * sw + kw)
        return self.channels * (weights + halo) * ITEMSIZE


def choose_staging(op: Conv2d) -> Staging:
    """As many channels as leave room for several blocks; one row if not even one channel fits."""
    whole = Staging(1, op.kernel_size[0])
    if whole.nbytes(op) > MAX_SHARED_NBYTES:
        return Staging(1, 1)
    channels = min(WANTED_SHARED_NBYTES // whole.nbytes(op), MAX_CHANNELS, op.in_channels)
    return Staging(max(1, channels), op.kernel_size[0])


@dataclass(frozen=True, eq=False)
class DirectTiled(ConvKernel):
    """One block per output tile; input and weights are staged in shared memory."""

    algorithm = "direct_tiled"

    @property
    def edges(self) -> tuple[int, ...]:
        return (TILE_H, TILE_O)

    @property
    def entry(self) -> Entry:
        tile = (("TILE_H", TILE_H), ("TILE_W", TILE_W), ("TILE_O", TILE_O))
        return Entry("conv/direct_tiled", "conv2d_direct_tiled", (self.storage, *tile))

    def entries(self) -> tuple[Entry, ...]:
        return (self.entry,)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        needed = choose_staging(op).nbytes(op)
        if needed > MAX_SHARED_NBYTES:
            return (
                f"one row of its windows takes {needed} bytes of shared memory; "
                f"a block has {MAX_SHARED_NBYTES}"
            )
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Weights (O, C, kh, kw) as (tiles of O, C, kh, kw, TILE_O), padded with zeros."""
        weight, *bias = super().pack(problem, weights)
        o, *window = weight.shape
        padded = np.zeros((ceil_div(o, TILE_O) * TILE_O, *window), weight.dtype)
        padded[:o] = weight
        tiles = padded.reshape(-1, TILE_O, *window).transpose(0, 2, 3, 4, 1)
        return (np.ascontiguousarray(tiles), *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        op, staging = cast(Conv2d, problem.op), choose_staging(cast(Conv2d, problem.op))
        n, o, oh, ow = problem.output
        blocks = ceil_div(ow, TILE_W) * ceil_div(oh, TILE_H) * ceil_div(o, TILE_O) * n
        return (
            GridLaunch(
                self.entry,
                (blocks, 1, 1),
                (TILE_THREADS, 1, 1),
                (
                    X,
                    Pointer(Role.WEIGHT),
                    *bias_and_residual(op),
                    OUT,
                    conv_shape(problem),
                    np.int32(staging.channels),
                    np.int32(staging.window_rows),
                ),
                shared_nbytes=staging.nbytes(op),
            ),
        )
