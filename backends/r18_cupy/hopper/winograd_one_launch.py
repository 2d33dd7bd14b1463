"""Winograd convolution F(4×4, 3×3) in one launch. NCHW, float32.

The transforms, the filters and the error bound are those of conv/winograd.py. Neither transformed
tiles nor products leave the multiprocessor, so there is no workspace. See
kernels/hopper/winograd_one_launch.cu.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP32
from r18_cupy.conv.base import ConvKernel, bias_and_residual, conv_shape
from r18_cupy.conv.winograd import FILTER_TRANSFORMS, FLOAT_NBYTES
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct

OUTPUT_TILE = 4
POSITIONS = (OUTPUT_TILE + 2) ** 2
MULTIPLIER_WARPS = POSITIONS // 3
PRODUCER_WARPS = 4
THREADS = 32 * (PRODUCER_WARPS + MULTIPLIER_WARPS)
WIDTHS = (4, 2, 1)  # pixels that a thread loads or stores at a time
SIDE = 8  # channels, and tiles, of a thread's sums
PART_CHANNELS, PART_TILES, STEP_CHANNELS = 64, 16, 4
STAGES = 3  # steps in shared memory
BUFFER_UNITS = 5  # of a thread's 8 channels have their sums in shared memory at a time
BARRIER_NBYTES = 128  # of a stage: a full/empty pair of mbarriers, aligned
STAGE_NBYTES = POSITIONS * STEP_CHANNELS * (PART_CHANNELS + PART_TILES) * FLOAT_NBYTES
UNIT_NBYTES = POSITIONS * PART_CHANNELS // SIDE * PART_TILES * FLOAT_NBYTES
SHARED_NBYTES = STAGES * (STAGE_NBYTES + BARRIER_NBYTES) + BUFFER_UNITS * UNIT_NBYTES

# Mirrors `Divisor` in kernels/hopper/winograd_one_launch.cu.
DIVISOR = np.dtype([(name, np.uint32) for name in ("number", "reciprocal", "shift")])

# Mirrors `WinogradParts`.
PARTS = np.dtype(
    [
        *((name, DIVISOR) for name in ("rows", "columns", "blocks")),
        *((name, np.int32) for name in ("tiles", "steps", "parts")),
    ]
)


def divisor(number: int) -> tuple[int, int, int]:
    """The number, its reciprocal and a shift: `i * reciprocal >> shift` is `i // number` for every
    i below 2^31, as the reciprocal's excess, less than `number`, makes less than 1 / number of it.
    """
    shift = 31 + (number - 1).bit_length()
    return number, ceil_div(1 << shift, number), shift


def width_of(problem: Problem) -> int:
    """How many pixels are loaded and stored at a time: rows of the input from the second column of
    a tile on, and rows of the output, are aligned to as many.
    """
    op = cast(Conv2d, problem.op)
    extents = (problem.inputs[0][3], problem.output[3], 1 - op.padding[1])
    return next(width for width in WIDTHS if not any(extent % width for extent in extents))


@dataclass(frozen=True, eq=False)
class WinogradOneLaunch(ConvKernel):
    """F(4×4, 3×3). Each multiprocessor computes parts of 64 output channels of 16 tiles in turn,
    and keeps their sums at all 36 positions in registers.
    """

    algorithm = "winograd_f4x4_one_launch"
    minimum_capability: ClassVar[tuple[int, int]] = (9, 0)
    family: ClassVar[str | None] = "sm_90a"

    @property
    def contract(self) -> RoundingContract:
        return RoundingContract("winograd_f4x4", self.precision.accumulate, self.precision.storage)

    @property
    def edges(self) -> tuple[int, ...]:
        return (STEP_CHANNELS, OUTPUT_TILE, OUTPUT_TILE + 2, PART_TILES, PART_CHANNELS)

    @property
    def extra_problems(self) -> tuple[Problem, ...]:
        """Each width of loads and stores, with rows of tiles that end within a part."""
        found = []
        for shape, o, padding in (
            ((2, 5, 9, 12), 33, (1, 1)),
            ((3, 8, 14, 14), 64, (1, 1)),
            ((1, 9, 5, 16), 7, (2, 5)),
            ((2, 4, 11, 10), 34, (0, 3)),
            ((5, 6, 7, 7), 40, (1, 1)),
            ((1, 3, 18, 8), 31, (1, 0)),
        ):
            op = Conv2d(shape[1], o, (3, 3), (1, 1), padding, bias=True, relu=True)
            found.append(Problem(replace(op, residual=True), (shape, op.infer(shape))))
        return tuple(found)

    def entry(self, width: int) -> Entry:
        macros = (("WIDTH", width),)
        return Entry("hopper/winograd_one_launch", "winograd_one_launch", macros, self.family)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(self.entry, WIDTHS))

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, problem.op)
        if op.kernel_size != (3, 3) or op.stride != (1, 1):
            return "Winograd takes 3×3 windows of stride 1"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Filters as G g Gᵀ, computed in float64 from float32 weights and rounded once.

        Returns (blocks of O, steps of C, positions, STEP_CHANNELS, PART_CHANNELS), padded with
        zeros: each step's filters in the order in which they are in shared memory.
        """
        weight, *bias = super().pack(problem, weights)
        g = FILTER_TRANSFORMS[OUTPUT_TILE]
        with np.errstate(over="ignore", invalid="ignore"):  # infinite weights become NaN
            filters = (g @ weight.astype(np.float64) @ g.T).astype(np.float32)
        o, c = weight.shape[:2]
        padded = np.pad(filters, ((0, -o % PART_CHANNELS), (0, -c % STEP_CHANNELS), (0, 0), (0, 0)))
        steps = ceil_div(c, STEP_CHANNELS)
        parts = padded.reshape(-1, PART_CHANNELS, steps, STEP_CHANNELS, POSITIONS)
        return (np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)), *bias)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        n, c = problem.inputs[0][:2]
        o, oh, ow = problem.output[1:]
        rows, columns = ceil_div(oh, OUTPUT_TILE), ceil_div(ow, OUTPUT_TILE)
        tiles, blocks = n * rows * columns, ceil_div(o, PART_CHANNELS)
        parts = ceil_div(tiles, PART_TILES) * blocks
        divisors = map(divisor, (rows, columns, blocks))
        fields = (*divisors, tiles, ceil_div(c, STEP_CHANNELS), parts)
        return (
            GridLaunch(
                self.entry(width_of(problem)),
                (min(parts, MULTIPROCESSORS), 1, 1),
                (THREADS, 1, 1),
                (
                    X,
                    Pointer(Role.WEIGHT),
                    *bias_and_residual(cast(Conv2d, problem.op)),
                    OUT,
                    conv_shape(problem),
                    struct(np.array([fields], PARTS)),
                ),
                shared_nbytes=SHARED_NBYTES,
                overlaps=True,
            ),
        )


def winograd_one_launch_kernels() -> tuple[WinogradOneLaunch, ...]:
    return (WinogradOneLaunch(FP32),)
