"""Every kernel of a quantised op; for each op the preferred one comes first."""

from __future__ import annotations

from r18.graph.ops import Layout
from r18_cupy.integers.direct import QuantizedDirect, QuantizedDirectGrouped
from r18_cupy.integers.gap import QuantizedGap
from r18_cupy.integers.gap_linear import QuantizedGapLinear
from r18_cupy.integers.implicit_gemm_mma import implicit_gemm_mma_kernels
from r18_cupy.integers.implicit_gemm_wgmma import implicit_gemm_wgmma_kernels
from r18_cupy.integers.kernel import IntegerKernel
from r18_cupy.integers.linear import QuantizedTiledLinear, QuantizedWarpDot
from r18_cupy.integers.maxpool2d import QuantizedMaxPool
from r18_cupy.integers.quantize import QuantizeKernel, QuantizePixelsKernel
from r18_cupy.integers.relayout import QuantizedTranspose
from r18_cupy.integers.wgmma_halo import halo_kernels

NHWC_FIRST = (Layout.NHWC, Layout.NCHW)
"""Both layouts, first the one in which tensor cores read activations."""


def integer_kernels() -> tuple[IntegerKernel, ...]:
    return (
        *implicit_gemm_wgmma_kernels(),
        *halo_kernels(),
        *implicit_gemm_mma_kernels(),
        *(
            kernel(layout=layout)
            for kernel in (
                QuantizedDirect,
                QuantizedMaxPool,
                QuantizedGap,
                QuantizeKernel,
                QuantizePixelsKernel,
            )
            for layout in NHWC_FIRST
        ),
        QuantizedDirectGrouped(),
        QuantizedWarpDot(),
        QuantizedTiledLinear(),
        QuantizedGapLinear(),
        QuantizedTranspose(),
    )
