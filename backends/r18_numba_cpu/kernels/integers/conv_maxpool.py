"""A convolution of bytes fused with its max pooling, of an image that may be quantised on its way.

See `kernels.conv_maxpool`, and for the image `bands`.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from r18_numba_cpu.kernels.arguments import SUMS, Blocks, ConvShape, Requantization, Terms
from r18_numba_cpu.kernels.blocks import begin_count
from r18_numba_cpu.kernels.conv_maxpool import pooled
from r18_numba_cpu.kernels.integers.bands import Image, copy_band
from r18_numba_cpu.kernels.integers.implicit_gemm import multiply_band
from r18_numba_cpu.kernels.jit import kernel
from r18_numba_cpu.kernels.micro_kernel import COLUMNS, ROWS

make_blocks = pooled(copy_band, multiply_band)


@kernel
def conv_maxpool(
    x, weight, bias, multiplier, residual_multiplier, maker, out, sums, scratch, made, lines,
    numbers, pooling, counters,
):  # fmt: skip
    """out (N, PH, PW, O): the maxima of windows of the convolution's bytes (N, OH, OW, O).

    x, maker: see `Image`. weight, bias, multiplier, sums, scratch, numbers: as of `implicit_gemm`,
    with blocks of one sample and all panels, and at most blocking.rows rows of the convolution.
    residual_multiplier: (1,); there is no residual. made: these rows, and lines: a row of them or
    of the image, for each worker. pooling: a `ConvShape` of the pooling, the rows of pooled outputs
    in a block, the bytes of a line, whether bytes are pixels, 128 if the outputs are signed, and
    `stack` and `shift` of an `Image`, as int64.
    """
    # NOTE: made here, because `prange` takes a named tuple only from where it is made.
    n = numbers
    shape = ConvShape(
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12]
    )
    blocking = Blocks(n[13], n[14], n[15], n[16], n[17])
    how = Requantization(
        np.uint8(n[18]), n[19] != 0, n[20] != 0, np.float32(n[21]), np.float32(n[22])
    )
    p = pooling
    pool = ConvShape(
        p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12]
    )
    line_size, of_pixels, flip, stack, shift = p[14], p[15] != 0, np.uint8(p[16]), p[17], p[18]
    made_size = blocking.rows * shape.out_w * shape.outputs
    panels = (shape.outputs + COLUMNS - 1) // COLUMNS
    group = 4 // weight.itemsize  # 32 bits of B, but for AMX
    length = weight.size // (panels * shape.kernel_h * COLUMNS * group)
    workers = begin_count(counters)
    for worker in prange(workers):
        conv = made[worker * made_size : (worker + 1) * made_size]
        line = lines[worker * line_size : (worker + 1) * line_size]
        # NOTE: in here, because Numba's `prange` does not take a tuple that holds a tuple.
        terms = Terms(bias, multiplier, conv, residual_multiplier, conv, how)
        slot = scratch[worker * blocking.slot : (worker + 1) * blocking.slot]
        make_blocks(
            counters, worker, Image(x, maker, of_pixels, how.flip, stack, shift), shape, blocking,
            pool, p[13], length, weight, sums, worker * n[SUMS], slot, ROWS * COLUMNS, conv, line,
            terms, numbers, out, flip,
        )  # fmt: skip
