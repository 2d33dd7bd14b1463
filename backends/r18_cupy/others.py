"""Every kernel of an op that is no convolution."""

from __future__ import annotations

from r18.graph.ops import Layout
from r18.graph.precision import Precision
from r18_cupy.elementwise import AddKernel, BatchNormKernel, ReLUKernel
from r18_cupy.kernel import CudaKernel
from r18_cupy.linear import TiledLinear, WarpDot
from r18_cupy.pooling import Gap, MaxPool
from r18_cupy.relayout import Transpose
from r18_cupy.softmax import Softmax


def other_kernels(precision: Precision) -> tuple[CudaKernel, ...]:
    """Each op on 4-d activations in both layouts; the preferred kernel of an op first."""
    return (
        *(
            kernel(precision, layout)
            for kernel in (BatchNormKernel, ReLUKernel, AddKernel, MaxPool, Gap)
            for layout in Layout
        ),
        WarpDot(precision),
        TiledLinear(precision),
        Softmax(precision),
        Transpose(precision),
    )
