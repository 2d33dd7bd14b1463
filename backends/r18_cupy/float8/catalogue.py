"""Every kernel of a scaled op; for each op the preferred one comes first."""

from __future__ import annotations

from r18.graph.ops import Layout
from r18_cupy.float8.direct import ScaledDirect
from r18_cupy.float8.few_channels_mma import ScaledFewChannelsMma
from r18_cupy.float8.gap_linear import ScaledGapLinear
from r18_cupy.float8.implicit_gemm_wgmma import ScaledImplicitGemmWgmma
from r18_cupy.float8.kernel import Float8Kernel
from r18_cupy.float8.others import (
    ScaledGap,
    ScaledMaxPool,
    ScaledTiledLinear,
    ScaledTranspose,
    ScaledWarpDot,
    ScaleKernel,
)
from r18_cupy.float8.stem_wgmma import ScaledStemWgmma
from r18_cupy.float8.wgmma_halo import ScaledImplicitGemmWgmmaHalo, ScaledImplicitGemmWgmmaResident

NHWC_FIRST = (Layout.NHWC, Layout.NCHW)
"""Both layouts, first the one in which tensor cores read activations."""


def float8_kernels() -> tuple[Float8Kernel, ...]:
    return (
        ScaledImplicitGemmWgmmaResident(),
        ScaledImplicitGemmWgmma(),
        ScaledImplicitGemmWgmmaHalo(),
        ScaledFewChannelsMma(),
        *(
            kernel(layout=layout)
            for kernel in (ScaledDirect, ScaledMaxPool, ScaledGap, ScaleKernel)
            for layout in NHWC_FIRST
        ),
        ScaledWarpDot(),
        ScaledTiledLinear(),
        ScaledGapLinear(),
        ScaledTranspose(),
        ScaledStemWgmma(),
    )
