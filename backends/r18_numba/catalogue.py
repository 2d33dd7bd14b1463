"""Every kernel, the preferred one for an op first, and which tile fills a GPU."""

from __future__ import annotations

from functools import cache

from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import INT8
from r18.graph.quantized import QuantizedConv2d
from r18_numba.conv import IMPLICIT_GEMM_TILES, WINOGRAD_TILES, DirectConv, ImplicitGemm, Winograd
from r18_numba.integers.conv import DirectQuantizedConv, QuantizedImplicitGemm
from r18_numba.integers.linear import QuantizedLinearKernel
from r18_numba.integers.others import (
    QuantizedGapKernel,
    QuantizedMaxPoolKernel,
    QuantizedRelayoutKernel,
    QuantizeKernel,
    QuantizePixelsKernel,
)
from r18_numba.kernel import PRECISIONS, NumbaKernel, ceil_div
from r18_numba.others import (
    LINEAR_TILES,
    AddKernel,
    BatchNormKernel,
    GapKernel,
    LinearKernel,
    MaxPoolKernel,
    NormalizeKernel,
    ReluKernel,
    SoftmaxKernel,
)

PLAIN = (
    DirectConv,
    BatchNormKernel,
    ReluKernel,
    AddKernel,
    MaxPoolKernel,
    GapKernel,
    SoftmaxKernel,
    NormalizeKernel,
)
PLAIN_INTEGERS = (
    DirectQuantizedConv,
    QuantizedMaxPoolKernel,
    QuantizedGapKernel,
    QuantizeKernel,
    QuantizePixelsKernel,
    QuantizedRelayoutKernel,
)
WINOGRAD_CHANNELS = 64
"""From this many input and output channels on, Winograd saves more multiplications than its extra
memory traffic costs."""

WARP = 32


@cache
def all_kernels() -> tuple[NumbaKernel, ...]:
    """Every kernel, for the GPU and for the simulator."""
    kernels: list[NumbaKernel] = []
    for precision in PRECISIONS:
        kernels += [ImplicitGemm(precision, tile) for tile in IMPLICIT_GEMM_TILES]
        kernels += [Winograd(precision, tile) for tile in WINOGRAD_TILES]
        kernels += [LinearKernel(precision, *tile) for tile in LINEAR_TILES]
        kernels += [kind(precision) for kind in PLAIN]
    kernels += [QuantizedImplicitGemm(INT8, tile) for tile in IMPLICIT_GEMM_TILES]
    kernels += [QuantizedLinearKernel(INT8, *tile) for tile in LINEAR_TILES]
    kernels += [kind(INT8) for kind in PLAIN_INTEGERS]
    return tuple(kernels)


@cache
def simulated_kernels() -> tuple[NumbaKernel, ...]:
    """The kernels that the simulator runs in good time: of the tiled ones, the smallest tile."""
    return tuple(kernel for kernel in all_kernels() if kernel.simulates)


def filling(problem: Problem, precision: str, multiprocessors: int) -> str | None:
    """The id of the convolution kernel whose tiles leave the fewest multiprocessors idle.

    For devices without a tuning table. None for other ops. The cost of a tile is the number of
    waves of blocks times its size, plus a share for loads from shared memory, which is larger for
    small tiles. Tiles of less than a warp are for the simulator.
    """
    op = problem.op
    integers = isinstance(op, QuantizedConv2d)
    conv = op.conv if isinstance(op, QuantizedConv2d) else op
    if not isinstance(conv, Conv2d):
        return None
    samples, outputs, out_height, out_width = problem.output
    wide = min(conv.in_channels, outputs) >= WINOGRAD_CHANNELS and not integers
    small = conv.kernel_size == (3, 3) and conv.stride == (1, 1)
    plain = QuantizedImplicitGemm if integers else ImplicitGemm
    kind = Winograd if wide and small else plain
    if kind is Winograd:
        columns, layers = samples * ceil_div(out_height, 2) * ceil_div(out_width, 2), 16
    else:
        columns, layers = samples * out_height * out_width, 1

    def cost(kernel: Winograd | ImplicitGemm) -> float:
        tile = kernel.tile
        blocks = ceil_div(columns, tile.n) * ceil_div(outputs, tile.m) * layers
        reads = 1 / tile.rows + 1 / tile.columns
        return ceil_div(blocks, multiprocessors) * tile.m * tile.n * (1 + reads)

    usable = [
        kernel
        for kernel in all_kernels()
        if type(kernel) is kind
        and kernel.precision.name == precision
        and kernel.tile.threads >= WARP
        and kernel.refusal(problem) is None
    ]
    return min(usable, key=cost).id if usable else None
