"""The CPU's convolutions: how a problem is cut up, how weights are packed, which algorithm pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from r18.backend import Array, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import Conv2d, Layout, Problem, Shape
from r18.graph.precision import FP32
from r18_numba.cpu.compiled import NAME, RUNNING, ceil_div, module, most_threads, panels, workers

Arrays = tuple[Array, ...]
FLOAT_NBYTES = 4

LINES = (16, 32)
"""Sizes at which vectors and panels end, of the widest registers; those of narrower ones divide
them."""

GROUPS = (6, 14)
"""The most pixels in a tile of the product, of narrow and wide registers."""


@cache
def conv_kernels() -> tuple[HostKernel, ...]:
    """The preferred first, where neither algorithm is known to be faster.

    The third reads the image as it comes, (N, C, H, W): a plan then needs no relayout.
    """
    gemm = HostKernel(
        NAME,
        Conv2d,
        "implicit_gemm",
        FP32,
        RoundingContract("sum", FP32.accumulate, FP32.storage),
        implicit_gemm,
        layout=Layout.NHWC,
        edges=(*GROUPS, *LINES),
        batch_invariant=True,
        scratch=implicit_gemm_nbytes,
        pack=pack_panels,
    )
    winograd_f4x4 = replace(
        gemm,
        algorithm="winograd_f4x4",
        contract=RoundingContract("winograd_f4x4", FP32.accumulate, FP32.storage),
        run=winograd,
        edges=(4, 6, *GROUPS, *LINES),
        extra_problems=winograd_extra_problems(),
        refuses=winograd_refuses,
        scratch=winograd_nbytes,
        pack=pack_filters,
    )
    from_planes = replace(
        gemm,
        run=implicit_gemm_from_planes,
        reads=Layout.NCHW,
        refuses=_from_planes_refuses,
    )
    return gemm, winograd_f4x4, from_planes


def fastest(problem: Problem) -> str | None:
    """The id of the kernel that a plan prefers for a convolution: Winograd's where it pays.

    It makes a quarter of the products and reads four times the filters, so it pays where enough
    tiles share them.
    """
    op = problem.op
    if not isinstance(op, Conv2d):
        return None
    gemm, winograd, _ = conv_kernels()
    if winograd.refusal(problem) is not None or min(op.in_channels, op.out_channels) < LINES[0]:
        return gemm.id
    filters = PLACES * op.in_channels * op.out_channels * FLOAT_NBYTES
    pays = filters <= RESIDENT_NBYTES or tiling(problem).tiles >= SHARING_TILES
    return winograd.id if pays else gemm.id


RESIDENT_NBYTES = 12 << 20
"""Transformed filters of so many bytes are worth reading for an image alone."""

SHARING_TILES = 8
"""Of larger filters, the tiles that share them when reading them is worth it."""


# -- implicit GEMM -----------------------------------------------------------------------------

BAND_NBYTES = 128 << 10
"""A band of the padded image of about this size stays in a core's second-level cache."""


@dataclass(frozen=True)
class Bands:
    """How an implicit GEMM is cut into blocks, which workers take one after another.

    rows:   of outputs in a band. panels: of output channels in a block.
    nelements: of a band of the padded image.
    """

    rows: int
    panels: int
    nelements: int


def bands(problem: Problem, threads: int) -> Bands:
    """It decides how fast, never what, is computed.

    Bands are as high as the cache holds. Where there are fewer than threads, channels are shared
    out too.
    """
    op = _conv(problem)
    n, outputs, out_h, out_w = problem.output
    length = ((out_w - 1) * op.stride[1] + op.kernel_size[1]) * op.in_channels

    def input_rows(rows: int) -> int:
        return (rows - 1) * op.stride[0] + op.kernel_size[0]

    fitting = BAND_NBYTES // (FLOAT_NBYTES * length)
    rows = max(1, min(out_h, (fitting - op.kernel_size[0]) // op.stride[0] + 1))
    rows = ceil_div(out_h, ceil_div(out_h, rows))
    splits = min(panels(outputs), ceil_div(2 * threads, n * ceil_div(out_h, rows)))
    return Bands(rows, ceil_div(panels(outputs), splits), input_rows(rows) * length)


def _sums_nelements() -> int:
    """Of a tile of the product."""
    product = module("product")
    return int(product.ROWS * product.COLUMNS)


def _implicit_gemm_slot(cut: Bands) -> int:
    return _whole_lines(_sums_nelements() + cut.nelements)


def implicit_gemm_nbytes(problem: Problem) -> int:
    threads = most_threads()
    return threads * _implicit_gemm_slot(bands(problem, threads)) * FLOAT_NBYTES


def pack_panels(op: Conv2d, weights: Arrays) -> Arrays:
    """Filters (panels, kh·kw·C, columns) and the bias, filled up with zeros to whole panels."""
    matrix = weights[0].transpose(2, 3, 1, 0).reshape(op.depth, op.out_channels)
    return to_panels(matrix), _whole_bias(op, weights)


def to_panels(matrix: Array) -> Array:
    """(…, K, O) as (…, panels, K, columns), zeros in the columns beyond O."""
    *leading, depth, outputs = matrix.shape
    columns = module("product").COLUMNS
    whole: Array = np.zeros((*leading, depth, panels(outputs) * columns), np.float32)
    whole[..., :outputs] = matrix
    return np.ascontiguousarray(whole.reshape(*leading, depth, -1, columns).swapaxes(-3, -2))


def _whole_bias(op: Conv2d, weights: Arrays) -> Array:
    bias: Array = np.zeros(panels(op.out_channels) * module("product").COLUMNS, np.float32)
    if op.bias:
        bias[: op.out_channels] = weights[1]
    return bias


def implicit_gemm(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    _implicit_gemm(op, inputs, weights, out, workspace, inputs[0].shape, planes=False)


def implicit_gemm_from_planes(
    op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
) -> None:
    n, channels, height, width = inputs[0].shape
    shape = (n, height, width, channels)
    _implicit_gemm(op, inputs, weights, out, workspace, shape, planes=True)


def _implicit_gemm(
    op: Conv2d,
    inputs: Arrays,
    weights: Arrays,
    out: Array,
    workspace: Array,
    shape: Shape,
    planes: bool,
) -> None:
    """On an input of shape (N, H, W, C), whether it lies so or in planes."""
    n, height, width, channels = shape
    out_h, out_w, outputs = out.shape[1:]
    cut = bands(_problem(op, shape, out.shape), most_threads())
    with RUNNING:
        module("implicit_gemm").implicit_gemm(
            *_flat(inputs[0], weights[0], weights[1], inputs[-1], out),
            workspace.view(np.float32),
            *(workers(), _implicit_gemm_slot(cut)),
            *(n, channels, height, width, outputs, out_h, out_w),
            *(*op.kernel_size, *op.stride, *op.padding),
            *(cut.rows, cut.panels, planes, op.residual, op.relu),
        )


# -- Winograd ----------------------------------------------------------------------------------

PLACES = 36
CACHED_NBYTES = 512 << 10
"""What a worker's tiles may take of its core's second-level cache."""

FILTER_NBYTES = 4 << 20
"""Transformed filters up to this size stay in the last-level cache, for every worker to read."""

ROUND_NBYTES = 16 << 20
"""What the tiles of a round may take where filters are larger than that."""

# G of F(4×4, 3×3): with the Bᵀ and Aᵀ of `kernels.winograd`, the matrices that the error bound is
# derived for.
FILTER_TRANSFORM = np.array(
    [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ]
)


@dataclass(frozen=True)
class Tiling:
    """How F(4×4, 3×3) is laid out.

    rows, columns: tiles of an image; `tiles` of the batch.
    chunk:  tiles that a worker takes at a time; where filters are shared, tiles of a round.
    shared: whether all workers share each phase.
    stride, sums_stride: elements between tiles, of transformed patches and of sums.
    """

    rows: int
    columns: int
    tiles: int
    chunk: int
    shared: bool
    stride: int
    sums_stride: int

    @property
    def place(self) -> int:
        """Elements between places, of transformed patches. NOTE: not a power of two, or all places
        of a patch would meet in a few lines of the caches."""
        return self.chunk * self.stride + LINES[0]

    @property
    def sums_place(self) -> int:
        return self.chunk * self.sums_stride + LINES[0]

    @property
    def nelements(self) -> int:
        """Of the transformed patches and the sums of a chunk."""
        return PLACES * (self.place + self.sums_place)

    @property
    def corner(self) -> int:
        """Elements that a worker needs besides for transforming one patch."""
        return 2 * PLACES * LINES[0]

    @property
    def slot(self) -> int:
        """Elements of a worker's own."""
        return self.corner if self.shared else self.corner + self.nelements


def tiling(problem: Problem) -> Tiling:
    """It decides how fast, never what, is computed."""
    op = _conv(problem)
    n, outputs, out_h, out_w = problem.output
    rows, columns = ceil_div(out_h, 4), ceil_div(out_w, 4)
    tiles = n * rows * columns
    stride = _whole_lines(op.in_channels) + LINES[0]
    sums_stride = _whole_lines(outputs, LINES[1]) + LINES[0]
    shared = PLACES * op.in_channels * outputs * FLOAT_NBYTES > FILTER_NBYTES
    tile_nbytes = PLACES * (stride + sums_stride) * FLOAT_NBYTES
    fitting = max(1, (ROUND_NBYTES if shared else CACHED_NBYTES) // tile_nbytes)
    chunks = ceil_div(tiles, fitting)
    if not shared:
        chunks = ceil_div(chunks, most_threads()) * most_threads()
    return Tiling(rows, columns, tiles, ceil_div(tiles, chunks), shared, stride, sums_stride)


def _whole_lines(elements: int, line: int = LINES[0]) -> int:
    return ceil_div(elements, line) * line


def _from_planes_refuses(problem: Problem) -> str | None:
    if _conv(problem).residual:
        return "the residual lies as the output does, the input does not"
    return None


def winograd_refuses(problem: Problem) -> str | None:
    op = _conv(problem)
    if op.kernel_size != (3, 3) or op.stride != (1, 1):
        return "Winograd takes 3×3 windows of stride 1"
    return None


def winograd_extra_problems() -> tuple[Problem, ...]:
    """Filters that all workers share: for a few tiles, and for as many as take two rounds.

    The first have channels at both ends of a vector; the second, on one channel, the fewest
    products of which a round holds but three tiles.
    """
    fewest = FILTER_NBYTES // (PLACES * FLOAT_NBYTES) + 1  # channels times outputs
    channels = 11 * LINES[0] + 1
    outputs = _whole_lines(ceil_div(fewest, channels), LINES[1])
    return (
        _fused(Conv2d(channels, outputs, (3, 3), (1, 1), (1, 1)), (2, channels, 5, 3)),
        _fused(Conv2d(1, fewest, (3, 3), (1, 1), (1, 1)), (2, 1, 1, 5)),
    )


def _fused(plain: Conv2d, shape: Shape) -> Problem:
    """With all that an epilogue may do."""
    op = replace(plain, bias=True, residual=True, relu=True)
    return Problem(op, (shape, plain.infer(shape)))


def winograd_nbytes(problem: Problem) -> int:
    cut = tiling(problem)
    shared = cut.nelements if cut.shared else 0
    return (most_threads() * cut.slot + shared) * FLOAT_NBYTES


def pack_filters(op: Conv2d, weights: Arrays) -> Arrays:
    """G g Gᵀ in panels (36, panels, C, columns), computed in float64 and rounded once; the bias."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinite weights make NaN
        filters = FILTER_TRANSFORM @ weights[0].astype(np.float64) @ FILTER_TRANSFORM.T
        places = filters.transpose(2, 3, 1, 0).reshape(PLACES, op.in_channels, op.out_channels)
        return to_panels(places), _whole_bias(op, weights)


def winograd(op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    height, width, channels = inputs[0].shape[1:]
    out_h, out_w, outputs = out.shape[1:]
    cut = tiling(_problem(op, inputs[0].shape, out.shape))
    arrays = _flat(inputs[0], weights[0], weights[1], inputs[-1], out)
    sizes = (channels, height, width, outputs, out_h, out_w, *op.padding, cut.rows, cut.columns)
    layout = (cut.place, cut.stride, cut.sums_place, cut.sums_stride, op.residual, op.relu)
    scratch = workspace.view(np.float32)
    kernels = module("winograd")
    with RUNNING:
        if not cut.shared:
            kernels.by_tiles(
                *arrays, scratch, workers(), cut.slot, cut.chunk, *sizes, cut.tiles, *layout
            )
            return
        for first in range(0, cut.tiles, cut.chunk):
            count = min(cut.chunk, cut.tiles - first)
            kernels.by_places(*arrays, scratch, workers(), cut.slot, first, count, *sizes, *layout)


@lru_cache(maxsize=1024)
def _problem(op: Conv2d, read: Shape, written: Shape) -> Problem:
    """The problem of arrays of these shapes, (N, H, W, C); worked out once: every run asks."""
    logical = [(n, channels, height, width) for n, height, width, channels in (read, written)]
    return Problem(op, tuple(logical[: op.arity]))


def _flat(*arrays: Array) -> tuple[Any, ...]:
    return tuple(array.reshape(-1) for array in arrays)


def _conv(problem: Problem) -> Conv2d:
    assert isinstance(problem.op, Conv2d)
    return problem.op
