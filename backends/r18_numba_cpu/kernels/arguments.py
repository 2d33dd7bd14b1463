"""The structured arguments of the kernels: named tuples, which Numba passes by value.

They are in this folder because compiled code depends on the order of their fields, and the name of
the cache folder is a hash over this folder.
"""

from __future__ import annotations

from typing import Any, NamedTuple

CACHE_LINE = 64
"""Bytes of a cache line."""

LINE = CACHE_LINE // 8
"""The int64 of a cache line: workers that count do not wait for each other's."""

RGB = 3
"""The channels whose planes are interleaved a vector at a time."""


class ConvShape(NamedTuple):
    """The extents of a convolution: x (N, C, H, W), out (N, O, OH, OW), and the window."""

    samples: int
    channels: int
    height: int
    width: int
    outputs: int
    out_h: int
    out_w: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int


class Epilogue(NamedTuple):
    """The epilogue's steps after adding the bias."""

    residual: bool
    relu: bool


class Groups(NamedTuple):
    """The parameters of `im2col` that a `ConvShape` lacks.

    channels, outputs: of a group, in and out.
    dilation_h, dilation_w: pixels from a tap to the next.
    slot: elements of scratch for each worker.
    """

    groups: int
    channels: int
    outputs: int
    dilation_h: int
    dilation_w: int
    slot: int


class Bands(NamedTuple):
    """Cache blocking of an implicit GEMM. Workers take one block after another.

    rows:   output rows of a block, which read one band of the padded image.
    panels: panels of output channels in a block.
    slot:   elements of scratch for each worker: a register tile and a band.
    """

    rows: int
    panels: int
    slot: int


class Blocks(NamedTuple):
    """Cache blocking of an implicit GEMM in bfloat16 or of bytes. Workers take block after block.

    samples: of a block. Their bands are copied first; then each panel is multiplied by all of them,
             so that weights which do not fit in L2 are read once for all these samples.
    rows:    output rows of a block, which read one band of each padded image.
    panels:  panels of output channels in a block.
    band:    elements of scratch from a sample's band to the next one's.
    slot:    elements of scratch for each worker.
    """

    samples: int
    rows: int
    panels: int
    band: int
    slot: int


class Tiling(NamedTuple):
    """Cache blocking of Winograd's F(4×4, 3×3).

    Transformed patches are 36 matrices of `patch_row`-element rows, one row for each tile; sums
    are 36 matrices of `sum_row`-element rows.

    fused:   each worker runs all three phases on its own chunks; otherwise all workers share each
             phase of a round.
    rows, columns: tiles of an image. tiles: tiles of the batch.
    chunk:   tiles in a chunk, or in a round if not fused.
    patch_row, sum_row: elements from a row to the next.
    patch_matrix, sum_matrix: elements from a matrix to the next.
    slot:    elements of scratch for each worker.
    """

    fused: bool
    rows: int
    columns: int
    tiles: int
    chunk: int
    patch_row: int
    patch_matrix: int
    sum_row: int
    sum_matrix: int
    slot: int


class Depth(NamedTuple):
    """The K extent of a product: `runs` runs of `length` elements, `stride` elements apart in A.

    In B they follow each other.
    """

    runs: int
    length: int
    stride: int


class Requantization(NamedTuple):
    """How bytes are read, and how sums become bytes.

    flip:      128 if the image's bytes are signed, else 0.
    residual, signed_residual: whether there is one, and whether it is int8.
    low, high: the ends of the output's format; kernels have them in float32.
    """

    flip: int
    residual: bool
    signed_residual: bool
    low: int
    high: int


class Tile(NamedTuple):
    """Where a register tile is in the output: its first pixel and channel, and a pixel's channels.

    Pixels are counted from the batch's first.
    """

    pixel: int
    channel: int
    outputs: int


class Terms(NamedTuple):
    """The arrays of an epilogue, flat, and its steps."""

    bias: Any
    multiplier: Any
    residual: Any
    residual_multiplier: Any
    out: Any
    how: Requantization


class Summed(NamedTuple):
    """The arrays of an epilogue of bfloat16, flat, and its steps: an `Epilogue`."""

    bias: Any
    residual: Any
    out: Any
    how: Any


TILES = 2
"""AMX's tiles of outputs, and of channels, that are multiplied at a time."""

MOST_ROWS, MOST_NBYTES = 16, 64
"""The rows of a tile, and the bytes of a row."""

MOST_PAIRS = 4
"""The most pairs of tiles of outputs that a slice multiplies before the next slice: their sums wait
in memory."""

SLICE = 32
"""The channels of a slice, in bfloat16: a row of a tile."""

GROUP = 4
"""Bytes of K that AMX multiplies at a time: an int32 of B has as many."""


class Cover(NamedTuple):
    """How AMX's tiles cover the outputs of a band.

    height: outputs in a tile, one a row.
    merged: whether a tile goes on in the next row of outputs; otherwise each row begins a tile.
    pitch:  outputs from one row to the next, with those between them that no one reads.
    step:   bytes of K in a tile.
    signed: whether the band's bytes are int8.
    slices: of the channels. In a band they follow each other, each as the band of an image of
            SLICE channels would be; and so they do in a panel of B.
    slice_stride: elements of a band from a slice to the next.
    """

    height: int
    merged: bool
    pitch: int
    step: int
    signed: bool
    slices: int = 1
    slice_stride: int = 0


COVER_FIELDS = len(Cover._fields)

SUMS, COVER = 23, 24
"""The indices of `sums` and of the `Cover` in `packed_numbers`."""


def packed_numbers(
    shape: ConvShape, blocking: Blocks, how: Requantization, sums: int, *cover: int
) -> tuple[int, ...]:
    """All arguments in one tuple, as `integers.implicit_gemm` unpacks them, and the int32 of a
    worker's sums.

    cover: what `tiles.arguments` makes.
    Numba takes 15 µs to pass three named tuples, and next to none for an array.
    """
    return (*shape, *blocking, *map(int, how), sums, *map(int, cover))


PAIRED_SUMS, PAIRED_COVER = 22, 23
"""The indices of `sums` and of the `Cover` in `paired_numbers`."""
PAIRED_SLICES, PAIRED_SLICE_STRIDE = (
    PAIRED_COVER + Cover._fields.index(name) for name in ("slices", "slice_stride")
)


def paired_numbers(
    shape: ConvShape, blocking: Blocks, how: Epilogue, from_nchw: bool, stored: int, sums: int,
    *cover: int,
) -> tuple[int, ...]:  # fmt: skip
    """All arguments in one tuple, as `bfloat16.implicit_gemm` unpacks them; see `packed_numbers`.

    shape: with the channels that a band has. stored: those that the image has.
    """
    return (*shape, *blocking, *map(int, how), int(from_nchw), stored, sums, *map(int, cover))
