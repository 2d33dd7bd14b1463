"""One tap of a window over an image: which pixel it reads for which output."""

from __future__ import annotations

from numpy.lib.stride_tricks import as_strided

from r18.backend import Array
from r18.graph.ops import Conv2d, Shape


def inside(offset: int, stride: int, extent: int, count: int) -> tuple[slice, slice]:
    """The outputs j < count whose source j·stride + offset is in [0, extent), and the sources."""
    first = max(0, -(offset // stride))
    last = min(count - 1, (extent - 1 - offset) // stride)
    begin = first * stride + offset
    return (
        slice(first, max(first, last + 1)),
        slice(begin, max(begin, last * stride + offset + 1), stride),
    )


def shift(op: Conv2d, x: Array, r: int, s: int, top: int, out: Array) -> None:
    """Copy the pixels of tap (r, s): out[…, i, j] = x[…, (top + i)·sh + r·dh − ph, j·sw + s·dw −
    pw], and 0 outside the image.

    x: 4-d, with H and W last. out: the same with the output's rows from `top` on, and OW.
    """
    (sh, sw), (ph, pw), (dh, dw), (h, w) = op.stride, op.padding, op.dilation, x.shape[2:]
    to_rows, rows = inside(top * sh + r * dh - ph, sh, h, out.shape[2])
    to_columns, columns = inside(s * dw - pw, sw, w, out.shape[3])
    out[..., : to_rows.start, :] = 0
    out[..., to_rows.stop :, :] = 0
    out[..., : to_columns.start] = 0
    out[..., to_columns.stop :] = 0
    out[..., to_rows, to_columns] = x[..., rows, columns]


def unfolded(op: Conv2d, band: Array, shape: Shape) -> Array:
    """A view of the pixels of every tap, of `shape` (C, kh, kw, N, OH, OW); one copy gathers them
    all.

    band: (C, N, H, W), with its padding. NOTE: a copy for each tap would let go of Python's lock as
    often, and a thread that waits for it sleeps.
    """
    c, n, h, w = band.strides
    (sh, sw), (dh, dw) = op.stride, op.dilation
    strides = (c, h * dh, w * dw, n, h * sh, w * sw)
    return as_strided(band, shape, strides, writeable=False)
