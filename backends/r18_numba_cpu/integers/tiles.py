"""How AMX's tiles cover a band: pure functions of sizes. See `kernels.amx`."""

from __future__ import annotations

from itertools import product

import numpy as np

from r18.backend import Array
from r18_numba_cpu.compiled import ceil_div, module
from r18_numba_cpu.kernels.arguments import (
    GROUP,
    MOST_NBYTES,
    MOST_PAIRS,
    MOST_ROWS,
    TILES,
    ConvShape,
    Cover,
)


def step(length: int) -> int:
    """Bytes of K in a tile: steps over `length` bytes are even, so that few are padding."""
    steps = ceil_div(length, MOST_NBYTES)
    return GROUP * ceil_div(ceil_div(length, steps), GROUP)


def padded(length: int) -> int:
    """`length` bytes of K in whole steps: less than MOST_NBYTES are padding."""
    return ceil_div(length, step(length)) * step(length)


def in_order(packed: Array, step: int) -> Array:
    """Panels with the rows of each of B's tiles together, in the order in which tiles are loaded.

    packed: (panels, kh, groups, columns, 1), uint32 or int32. step: bytes of K in a tile. Returns
    an array of that shape, whose elements are (panels, kh, steps, columns/LANES, step/GROUP,
    LANES).
    """
    lanes = int(module("vector").LANES)
    rows = packed.reshape(*packed.shape[:2], -1, step // GROUP, packed.shape[3] // lanes, lanes)
    return np.ascontiguousarray(rows.swapaxes(3, 4)).reshape(packed.shape)


def stack(kernel_h: int, kernel_w: int, channels: int, stride_h: int) -> int:
    """How many rows of the image a band has in one, side by side: 2 if K has fewer steps so.

    A kernel row of few channels fills only a part of a step, which takes as long. With a stride of
    2 every window begins with a row of the band, also if that is two of the image.
    """

    def steps(rows: int) -> int:
        return ceil_div(kernel_h, rows) * ceil_div(kernel_w * channels * rows, MOST_NBYTES)

    return 2 if stride_h == 2 and steps(2) < steps(1) else 1


def stacked(shape: ConvShape, rows: int) -> tuple[ConvShape, int]:
    """A convolution over an image whose rows are stacked, and which row begins the first stack.

    `rows` rows are one then, of as many times the channels; `rows` divides the stride. The height
    stays that of the image. Of a kernel that ends within a stack, further weights are 0.
    """
    pad = ceil_div(shape.pad_h, rows)
    found = shape._replace(
        channels=rows * shape.channels,
        kernel_h=ceil_div(shape.kernel_h, rows),
        stride_h=shape.stride_h // rows,
        pad_h=pad,
    )
    return found, rows * pad - shape.pad_h


def cover(shape: ConvShape, rows: int, signed: bool) -> Cover:
    """Few tiles for the outputs of a band of `rows` rows.

    Seen from a tile, the outputs of the next row are further neighbours if the distance is a whole
    number of them: those between two rows are computed in vain, but fewer tiles are cut off.
    """
    width = (shape.out_w - 1) * shape.stride_w + shape.kernel_w
    pitch, rest = divmod(shape.stride_h * width, shape.stride_w)
    merged = (rows - 1) * pitch + shape.out_w
    apart = rows * ceil_div(shape.out_w, MOST_ROWS)
    is_merged = not rest and ceil_div(merged, MOST_ROWS) < apart
    outputs = merged if is_merged else shape.out_w
    height = ceil_div(outputs, ceil_div(outputs, MOST_ROWS))
    length = shape.kernel_w * shape.channels
    return Cover(height, is_merged, pitch if is_merged else shape.out_w, step(length), signed)


def covered(shape: ConvShape, rows: int, how: Cover) -> int:
    """The outputs that tiles cover at a stretch: a row, or all `rows` and what is between them."""
    return (rows - 1) * how.pitch * how.merged + shape.out_w


def beyond(shape: ConvShape, rows: int, how: Cover) -> int:
    """The bytes after a band that tiles read: of outputs, and of K."""
    outputs = covered(shape, rows, how)
    cut = ceil_div(outputs, how.height) * how.height - outputs
    return cut * shape.stride_w * shape.channels + MOST_NBYTES


def places(shape: ConvShape, rows: int, how: Cover) -> tuple[int, ...]:
    """For each row of the tiles of a band of `rows` rows, which of its outputs it is; −1: none.

    Tiles of a band of fewer rows begin with the same rows.
    """
    lines, outputs = rows if how.merged else 1, covered(shape, rows, how)
    each = ceil_div(outputs, how.height)
    found = []
    for first, output in product(range(0, rows, lines), range(each * how.height)):
        line, column = divmod(output, how.pitch)
        is_kept = output < outputs and column < shape.out_w
        found.append((first + line) * shape.out_w + column if is_kept else -1)
    return tuple(found)


def sums_size() -> int:
    """The int32 or float32 of a worker's sums: of MOST_PAIRS pairs of tiles of outputs. Without
    slices two pairs are used: some sums are stored while others are read.
    """
    return MOST_PAIRS * TILES * MOST_ROWS * int(module("micro_kernel").COLUMNS)


def arguments(shape: ConvShape, rows: int, how: Cover) -> tuple[int, ...]:
    """What `kernels.amx` takes of a band of `rows` rows, as int64."""
    return (*how, *configuration(how), *places(shape, rows, how))


def configuration(how: Cover) -> tuple[int, ...]:
    """The 64 bytes that `ldtilecfg` loads, as 8 int64: palette 1, the rows and their bytes.

    Tiles 0 to 3 are sums; then come two of A and two of B.
    """
    columns = GROUP * int(module("vector").LANES)  # 64 bytes on every CPU with AMX
    sums, a, b = (how.height, columns), (how.height, how.step), (how.step // GROUP, columns)
    tiles = [sums] * TILES**2 + [a] * TILES + [b] * TILES
    content: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.zeros(64, np.uint8)
    content[0] = 1
    content[16:32].view(np.uint16)[:] = [nbytes for _, nbytes in tiles]
    content[48:56] = [rows for rows, _ in tiles]
    return tuple(content.view(np.int64).tolist())
