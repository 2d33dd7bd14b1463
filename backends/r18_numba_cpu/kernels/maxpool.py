"""Max pooling of every format, channels last.

1. A row of outputs: the maxima over its windows' rows, element by element, go to a line of keys.
2. An output: the maximum over its window's columns in the line, made a value again.

A key is an unsigned integer as wide as the element, in the order of the values, so that one
instruction is enough for the maximum and NaN wins. Rows and columns are taken in threes. Where a
window ends earlier, or the image does, the last one is taken again.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types

from r18_numba_cpu.kernels.blocks import begin_count, take_block
from r18_numba_cpu.kernels.jit import function, kernel, overload

AT_ONCE = 3
"""Rows, or columns, of a window that are read together."""

FLOATS = {
    types.uint16: (np.uint16, np.int16, np.int16(15), np.int16(0x7FFF), np.uint16(0x7F80 + 1)),
    types.uint32: (
        np.uint32, np.int32, np.int32(31), np.int32(0x7FFFFFFF), np.uint32(0x7F800000 + 1),
    ),
}  # fmt: skip
"""By the bits of bfloat16 and float32: the integers, the place of the sign, the other bits, and
how much −∞ is below 0 when its other bits are flipped."""


def key(bits, flip):
    """The key of an element. flip: 128 for int8, else 0."""
    raise NotImplementedError("compiled only")


@overload(key)
def _key(bits, flip):
    if bits == types.uint8:
        return lambda bits, flip: np.uint8(bits ^ flip)
    unsigned, signed, sign, others, below = FLOATS[bits]

    def of_float(bits, flip):
        # As a signed integer, a negative number is in order once its other bits are flipped. Then
        # −∞ becomes 0, and NaN below it comes around to above ∞.
        number = signed(bits)
        return unsigned(unsigned(number ^ (signed(number >> sign) & others)) + below)

    return of_float


def element(bits, flip):
    """The element of a key."""
    raise NotImplementedError("compiled only")


@overload(element)
def _element(bits, flip):
    if bits == types.uint8:
        return lambda bits, flip: np.uint8(bits ^ flip)
    unsigned, signed, sign, others, below = FLOATS[bits]

    def of_float(bits, flip):
        number = signed(unsigned(bits - below))
        return unsigned(number ^ (signed(number >> sign) & others))

    return of_float


@function
def largest(a, b, c):
    """The largest of three keys."""
    larger = a if a > b else b
    return larger if larger > c else c


@function
def fill_line(line, x, a, b, c, count, flip, more):
    """line[i] = the largest key of x[a + i], x[b + i] and x[c + i]; and of line[i], if `more`."""
    # NOTE: indices without a sign, or LLVM has no vectors.
    first, second, third = np.uint64(a), np.uint64(b), np.uint64(c)
    if more:
        for i in range(np.uint64(count)):
            two = largest(line[i], key(x[first + i], flip), key(x[second + i], flip))
            line[i] = largest(line[i], two, key(x[third + i], flip))
    else:
        for i in range(np.uint64(count)):
            line[i] = largest(
                key(x[first + i], flip), key(x[second + i], flip), key(x[third + i], flip)
            )


@function
def store_output(out, to, line, a, b, c, count, flip, more):
    """out[to + i] = the element of the largest of line[a + i], line[b + i] and line[c + i]; and of
    the key of out[to + i], if `more`.
    """
    place, first, second, third = np.uint64(to), np.uint64(a), np.uint64(b), np.uint64(c)
    if more:
        for i in range(np.uint64(count)):
            two = largest(key(out[place + i], flip), line[first + i], line[second + i])
            out[place + i] = element(largest(two, line[third + i], line[third + i]), flip)
    else:
        for i in range(np.uint64(count)):
            out[place + i] = element(
                largest(line[first + i], line[second + i], line[third + i]), flip
            )


@function
def pool_row(x, start, row, out, to, line, flip, shape):
    """Row `row` of an image's maxima at out[to:]. start: the row of x that is the image's first."""
    width, channels = shape.width, shape.channels
    length = width * channels
    top = row * shape.stride_h - shape.pad_h
    first, last = max(0, top), min(shape.height, top + shape.kernel_h) - 1
    for h in range(first, last + 1, AT_ONCE):
        fill_line(
            line, x, (start + h) * length, (start + min(h + 1, last)) * length,
            (start + min(h + 2, last)) * length, length, flip, h > first,
        )  # fmt: skip
    for j in range(shape.out_w):
        left = j * shape.stride_w - shape.pad_w
        begin, end = max(0, left), min(width, left + shape.kernel_w) - 1
        here = to + j * channels
        for w in range(begin, end + 1, AT_ONCE):
            store_output(
                out, here, line, w * channels, min(w + 1, end) * channels,
                min(w + 2, end) * channels, channels, flip, w > begin,
            )  # fmt: skip


@kernel
def maxpool(x, out, lines, flip, shape, counters):
    """Maxima over the part of each window that is inside the image. shape: as of a convolution.

    x, out: bytes, or the bits of floats. flip: 128 if they are int8, else 0. lines: scratch, a row
    of the image for each worker.
    """
    length = shape.width * shape.channels
    rows = shape.samples * shape.out_h
    workers = begin_count(counters)
    for worker in prange(workers):
        line = lines[worker * length : (worker + 1) * length]
        row = take_block(counters, worker, rows)
        while row < rows:
            start = row // shape.out_h * shape.height
            to = row * shape.out_w * shape.channels
            pool_row(x, start, row % shape.out_h, out, to, line, flip, shape)
            row = take_block(counters, worker, rows)
