"""Images of few channels on tensor cores: a convolution of horizontal stride 2, alone or with its
max-pooling. fp16, bf16 and tf32 products, sums in float32. Reads NCHW, writes NHWC.

K runs over the lines of a window, a row of it in one channel each, and in each over eight taps;
see kernels/conv2d_few_channels_mma.cu. A block computes some columns of the output, two rows of the
convolution a turn, down a strip of the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, cast

import numpy as np

from r18.backend import Array, RoundingContract
from r18.ops import Conv2d, ConvMaxPool, Layout, MaxPool2d, Op, Problem, parts_of
from r18.precision import BF16, FP16, TF32, Precision
from r18_cupy.compiler import Entry
from r18_cupy.conv import bias_and_residual, conv_shape
from r18_cupy.conv_implicit_gemm_mma import chunk_of, round_to_tf32
from r18_cupy.kernel import MAX_ELEMENTS, CudaKernel
from r18_cupy.launch import OUT, GridLaunch, Pointer, Role, X, ceil_div, struct
from r18_cupy.tile import TileConfig

SOURCE = "conv2d_few_channels_mma"
TAPS = 8  # of a line
STRIDE = 2
ROWS = 2  # of the convolution, a turn
STAGES = 2  # patches of the image in shared memory
STEP_BYTES = 32  # of K in an mma step
MAX_SHARED_NBYTES = 99 * 1024  # of a block on sm_86, sm_89 and sm_120, the least from sm_80 on
MAX_REACH = 2**30  # of padded images: the device's columns and rows reach a little farther
POOL = MaxPool2d((3, 3), (2, 2), (1, 1))  # the windows that are pooled, and their stride

# The host's side of `Task` in the device code.
TASK = np.dtype(
    [(name, np.int32) for name in ("rows", "columns", "ph", "pw", "strip", "steps", "patch_nbytes")]
)


@dataclass(frozen=True)
class FewChannelsTile(TileConfig):
    """`m` outputs of the convolution, in two rows, by `n` channels a block and turn.

    k: products of an mma step.
    warps: among which the columns are divided.
    blocks: of a multiprocessor at once; registers are held down for it.
    """

    warps: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def advance(self, pooled: bool) -> int:
        """Columns of the convolution from a warp's first to its neighbour's."""
        return self.m // (ROWS * self.warps) - (2 if pooled else 0)

    def columns(self, pooled: bool) -> int:
        """Columns of the result that a block computes."""
        return self.warps * self.advance(pooled) // (POOL.stride[1] if pooled else 1)

    def pitch(self, pooled: bool, precision: Precision) -> int:
        """Elements of a line of the patch: whole chunks, whatever of the first is not needed."""
        chunk = chunk_of(precision)
        columns = (self.warps - 1) * self.advance(pooled) + self.m // (ROWS * self.warps)
        before = chunk - (2 if precision.dtype.itemsize == 2 else 1)
        return ceil_div((columns - 1) * STRIDE + TAPS + before, chunk) * chunk


def tiles_of(precision: Precision) -> tuple[FewChannelsTile, ...]:
    """The tilings that are compiled, the larger first.

    A warp of 2×32 outputs and 64 channels reads 0.6 bytes of shared memory for each that the
    tensor cores could be given meanwhile; one of 2×16 leaves more blocks for a single image.
    """
    k = STEP_BYTES // precision.dtype.itemsize
    return (
        FewChannelsTile(256, 64, k, warps=4, blocks=2),
        FewChannelsTile(128, 64, k, warps=4, blocks=3),
    )


@dataclass(frozen=True)
class Blocking:
    """How a problem is computed: by which tile, and how many turns a block takes."""

    tile: FewChannelsTile
    strip: int


# -- geometry ----------------------------------------------------------------------------------


def conv_of(problem: Problem) -> Problem:
    """The convolution alone."""
    return parts_of(problem)[0] if isinstance(problem.op, ConvMaxPool) else problem


def lead(op: Conv2d, precision: Precision) -> int:
    """Elements from a line's first tap to the image's column of the output; of 16 bits, even."""
    padding = op.padding[1]
    return padding + padding % 2 if precision.dtype.itemsize == 2 else padding


def steps_of(op: Conv2d, precision: Precision) -> int:
    """mma steps of a window: its lines, in whole steps."""
    lines = op.in_channels * op.kernel_size[0]
    return ceil_div(lines * TAPS * precision.dtype.itemsize, STEP_BYTES)


def patch_nbytes(op: Conv2d, precision: Precision, tile: FewChannelsTile, pooled: bool) -> int:
    """Of the part of the image that a block's windows cover in a turn.

    Where a step is half empty, zeros follow, as far apart as the rows of the convolution.
    """
    lines = op.in_channels * ((ROWS - 1) * op.stride[0] + op.kernel_size[0])
    half_empty = op.in_channels * op.kernel_size[0] * TAPS * precision.dtype.itemsize % STEP_BYTES
    zeros = (ROWS - 1) * op.stride[0] + 1 if half_empty else 0
    return (lines + zeros) * tile.pitch(pooled, precision) * precision.dtype.itemsize


def shared_nbytes(op: Conv2d, precision: Precision, tile: FewChannelsTile, pooled: bool) -> int:
    """Patches, weights, where each step finds its two runs of 16 bytes (8 bytes a step), biases."""
    steps = steps_of(op, precision)
    weights, runs, biases = steps * tile.n * STEP_BYTES, ceil_div(steps, 2) * 16, tile.n * 4
    return STAGES * patch_nbytes(op, precision, tile, pooled) + weights + runs + biases


def turns_of(problem: Problem) -> int:
    """Turns down a whole image; with pooling, not counting the one before a strip."""
    rows = problem.output[2]
    return rows if isinstance(problem.op, ConvMaxPool) else ceil_div(rows, ROWS)


def blocks_of(problem: Problem, blocking: Blocking) -> int:
    n, o, _, columns = problem.output
    tile = blocking.tile
    column_tiles = ceil_div(columns, tile.columns(isinstance(problem.op, ConvMaxPool)))
    return n * ceil_div(turns_of(problem), blocking.strip) * column_tiles * ceil_div(o, tile.n)


# -- choosing ----------------------------------------------------------------------------------

# What the choice is made for, an H200: another device computes the same, perhaps less evenly.
MULTIPROCESSORS = 132
SHARED_OF_MULTIPROCESSOR = 227 * 1024
RESERVED_NBYTES = 1024  # of shared memory, for each block
PRODUCTS_A_CYCLE = {2: 1280, 4: 640}  # of a multiprocessor by mma.sync, by bytes of an element
SHARED_BYTES_A_CYCLE = 128  # of a multiprocessor
CONTENTION = 0.35  # of the less busy of the two pipes, which the other waits for
TURN_LATENCY = 700  # cycles of a turn in which a block's tensor cores wait
BLOCK_LATENCY = 3000  # cycles until the first patch and the weights are there
MAX_STRIPS = 256
BLOCK_CYCLES = 800  # of them, those in which the multiprocessor's other blocks wait too


def turn_cycles(op: Conv2d, precision: Precision, tile: FewChannelsTile) -> float:
    """What a multiprocessor is busy with a turn of a block: products and shared memory.

    Of each step a warp loads all weights, and four words a lane for 16 outputs.
    """
    products = tile.m * tile.n * tile.k / PRODUCTS_A_CYCLE[precision.dtype.itemsize]
    nbytes = tile.warps * tile.n * STEP_BYTES + tile.m // 16 * 4 * 4 * 32
    less, more = sorted((products, nbytes / SHARED_BYTES_A_CYCLE))
    return steps_of(op, precision) * (more + CONTENTION * less)


def estimate(problem: Problem, precision: Precision, blocking: Blocking) -> float:
    """Cycles, roughly: the busier of arithmetic and of waiting, on the busiest multiprocessor."""
    op, tile = cast(Conv2d, conv_of(problem).op), blocking.tile
    pooled = isinstance(problem.op, ConvMaxPool)
    share = ceil_div(blocks_of(problem, blocking), MULTIPROCESSORS)
    needed = shared_nbytes(op, precision, tile, pooled) + RESERVED_NBYTES
    resident = min(tile.blocks, SHARED_OF_MULTIPROCESSOR // needed)
    turns = blocking.strip + (0.5 if pooled else 0.0)
    work = turn_cycles(op, precision, tile)
    waiting = BLOCK_LATENCY + turns * (work + TURN_LATENCY)
    return max(share * (turns * work + BLOCK_CYCLES), ceil_div(share, resident) * waiting)


def possible_blockings(problem: Problem, precision: Precision) -> Iterator[Blocking]:
    """Tiles that fit in shared memory, with the strips that divide the turns most evenly."""
    op, pooled = cast(Conv2d, conv_of(problem).op), isinstance(problem.op, ConvMaxPool)
    turns = turns_of(problem)
    strips = sorted({ceil_div(turns, count) for count in range(1, min(turns, MAX_STRIPS) + 1)})
    for tile in tiles_of(precision):
        if shared_nbytes(op, precision, tile, pooled) <= MAX_SHARED_NBYTES:
            yield from (Blocking(tile, strip) for strip in strips)


@lru_cache(maxsize=4096)
def choose(problem: Problem, precision: Precision, tile: FewChannelsTile | None) -> Blocking:
    """The strip, and where none is given the tile, with the least estimate. Pure."""
    blockings = possible_blockings(problem, precision)
    fitting = (b for b in blockings if tile is None or b.tile == tile)
    return min(fitting, key=lambda blocking: estimate(problem, precision, blocking))


# -- weights -----------------------------------------------------------------------------------


def pack_weight(weight: Array, op: Conv2d, precision: Precision, n: int) -> Array:
    """OIHW to [tile of n channels][step][pair of mma tiles][lane][chunk], in storage format.

    Lines have TAPS taps, of which `lead` decides the first; zeros fill up. A lane holds of each of
    two mma tiles the taps of its column, lane / 4, in both halves of the step; columns are channels
    such that the device's lanes end with adjacent ones.
    """
    chunk, itemsize = chunk_of(precision), precision.dtype.itemsize
    o, c, kh, kw = weight.shape
    skipped = lead(op, precision) - op.padding[1]
    steps, tiles = steps_of(op, precision), ceil_div(o, n)
    with np.errstate(over="ignore"):  # beyond the largest finite value lies infinity
        stored = np.asarray(weight, precision.dtype)
    lines = np.zeros((tiles * n, steps * STEP_BYTES // itemsize // TAPS, TAPS), precision.dtype)
    lines[:o, : c * kh, skipped : skipped + kw] = stored.reshape(o, c * kh, kw)
    if precision.multiply == "tf32":
        lines = round_to_tf32(lines)
    # Channels: chunks, lanes that hold one, mma tiles that make it, two adjacent columns of each.
    # Places of K: steps, halves, lanes, the elements of a word.
    group, word = chunk // 2, 4 // itemsize
    axes = (tiles, n // (4 * chunk), 4, group, 2, steps, 2, 4, word)
    by_lane = lines.reshape(axes).transpose(0, 5, 1, 3, 2, 4, 7, 6, 8)
    pairs = by_lane.reshape(tiles, steps, n // 16, 2, 32, 2, word).transpose(0, 1, 2, 4, 3, 5, 6)
    return np.ascontiguousarray(pairs.reshape(tiles, steps, n // 16, 32, chunk))


# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FewChannelsMma(CudaKernel):
    """A tile for every problem, or the one that suits it best; see `choose`. Bits are the same."""

    algorithm = "few_channels_mma"
    reads: ClassVar[Layout] = Layout.NCHW
    minimum_capability: ClassVar[tuple[int, int]] = (8, 0)  # cp.async, m16n8k16, bf16 and tf32

    layout: Layout = Layout.NHWC
    config: FewChannelsTile | None = None

    @property
    def tile(self) -> str:
        return self.config.name if self.config else ""

    @property
    def pooled(self) -> bool:
        return self.op is ConvMaxPool

    @property
    def contract(self) -> RoundingContract:
        p = self.precision
        return RoundingContract("sum", p.accumulate, p.storage, truncates=True)

    @property
    def tiles(self) -> tuple[FewChannelsTile, ...]:
        return (self.config,) if self.config else tiles_of(self.precision)

    @property
    def edges(self) -> tuple[int, ...]:
        sizes = {chunk_of(self.precision)}
        for tile in self.tiles:
            columns = tile.columns(self.pooled)
            sizes |= {columns // tile.warps, columns, tile.n}
        return tuple(sorted(sizes))

    def entry(self, tile: FewChannelsTile) -> Entry:
        pitch = tile.pitch(self.pooled, self.precision)
        macros = (("POOL", int(self.pooled)), ("PITCH", pitch))
        return Entry(SOURCE, SOURCE, (self.storage, *tile.defines, *macros))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self.entry(tile) for tile in self.tiles)

    def refuses(self, problem: Problem) -> str | None:
        op = cast(Conv2d, conv_of(problem).op)
        _, _, h, w = problem.inputs[0]
        if op.stride[1] != STRIDE:
            return f"reads pairs of columns: takes a horizontal stride of 2, not {op.stride[1]}"
        if op.residual:
            return "adds no residual"
        taps = op.kernel_size[1] + lead(op, self.precision) - op.padding[1]
        if taps > TAPS:
            return f"multiplies rows of windows by {TAPS} elements; this one takes {taps}"
        if isinstance(problem.op, ConvMaxPool):
            pool = problem.op.pool
            if (pool.kernel_size, pool.stride) != (POOL.kernel_size, POOL.stride):
                return "pools windows of 3×3 with a stride of 2 and no others"
        if max(h + 2 * op.padding[0], w + 2 * op.padding[1]) > MAX_REACH:
            return f"indexes with 32 bits; the padded image has over {MAX_REACH} rows or columns"
        needed = min(shared_nbytes(op, self.precision, t, self.pooled) for t in self.tiles)
        if needed > MAX_SHARED_NBYTES:
            return (
                f"its weights and parts of the image take {needed} bytes of shared memory; "
                f"a block has {MAX_SHARED_NBYTES}"
            )
        packed = ceil_div(op.out_channels, self.tiles[0].n) * self.tiles[0].n
        if packed * steps_of(op, self.precision) * self.tiles[0].k > MAX_ELEMENTS:
            return "indexes with 32 bits; the packed weights have too many elements"
        return None

    def pack(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        op = cast(Conv2d, conv_of(problem).op)
        biases = (np.ascontiguousarray(bias, np.float32) for bias in weights[1:])
        return (pack_weight(weights[0], op, self.precision, self.tiles[0].n), *biases)

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        conv = conv_of(problem)
        op = cast(Conv2d, conv.op)
        blocking = choose(problem, self.precision, self.config)
        tile = blocking.tile
        padding = problem.op.pool.padding if isinstance(problem.op, ConvMaxPool) else (0, 0)
        task = (
            *problem.output[2:],
            *padding,
            blocking.strip,
            steps_of(op, self.precision),
            patch_nbytes(op, self.precision, tile, self.pooled),
        )
        bias, _ = bias_and_residual(op)
        return (
            GridLaunch(
                self.entry(tile),
                (blocks_of(problem, blocking), 1, 1),
                (tile.threads, 1, 1),
                (
                    X,
                    Pointer(Role.WEIGHT),
                    bias,
                    OUT,
                    conv_shape(conv),
                    struct(np.array([task], TASK)),
                ),
                shared_nbytes(op, self.precision, tile, self.pooled),
            ),
        )


@dataclass(frozen=True, eq=False)
class FewChannelsConv(FewChannelsMma):
    op: ClassVar[type[Op]] = Conv2d


@dataclass(frozen=True, eq=False)
class FewChannelsConvMaxPool(FewChannelsMma):
    op: ClassVar[type[Op]] = ConvMaxPool


def few_channels_mma_kernels() -> tuple[FewChannelsMma, ...]:
    """Of each op and precision the one that chooses, then its tiles."""
    return tuple(
        kernel(precision, config=config)
        for kernel in (FewChannelsConvMaxPool, FewChannelsConv)
        for precision in (FP16, BF16, TF32)
        for config in (None, *tiles_of(precision))
    )
