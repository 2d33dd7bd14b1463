"""Every kernel of the backend; for each op and precision the preferred one comes first."""

from __future__ import annotations

from functools import cache

from r18.graph.ops import Layout
from r18.graph.precision import BF16, FP16, FP16X3, FP32, TF32, Precision
from r18_cupy.conv.direct import Direct
from r18_cupy.conv.direct_grouped import direct_grouped_kernels
from r18_cupy.conv.direct_tiled import DirectTiled
from r18_cupy.conv.grouped_mma import grouped_mma_kernels
from r18_cupy.conv.im2col import im2col_kernels
from r18_cupy.conv.implicit_gemm import implicit_gemm_kernels
from r18_cupy.conv.implicit_gemm_mma import implicit_gemm_mma_kernels
from r18_cupy.conv.winograd import winograd_kernels
from r18_cupy.float8.catalogue import float8_kernels
from r18_cupy.hopper.implicit_gemm_cluster import implicit_gemm_cluster_kernels
from r18_cupy.hopper.implicit_gemm_wgmma import implicit_gemm_wgmma_kernels
from r18_cupy.hopper.implicit_gemm_wgmma_halo import implicit_gemm_wgmma_halo_kernels
from r18_cupy.hopper.implicit_gemm_wgmma_persistent import implicit_gemm_wgmma_persistent_kernels
from r18_cupy.hopper.implicit_gemm_wgmma_pingpong import implicit_gemm_wgmma_pingpong_kernels
from r18_cupy.hopper.implicit_gemm_wgmma_stationary import implicit_gemm_wgmma_stationary_kernels
from r18_cupy.hopper.linear_wgmma import linear_wgmma_kernels
from r18_cupy.hopper.projection_wgmma import projection_wgmma_kernels
from r18_cupy.hopper.winograd_cluster import winograd_cluster_kernels
from r18_cupy.hopper.winograd_one_launch import winograd_one_launch_kernels
from r18_cupy.integers.catalogue import integer_kernels
from r18_cupy.integers.stem_wgmma import stem_wgmma_kernels
from r18_cupy.kernel import CudaKernel
from r18_cupy.ops.elementwise import AddKernel, BatchNormKernel, ReLUKernel
from r18_cupy.ops.gap import Gap
from r18_cupy.ops.gap_linear import gap_linear_kernels
from r18_cupy.ops.linear import TiledLinear, WarpDot
from r18_cupy.ops.maxpool2d import MaxPool
from r18_cupy.ops.normalize import normalize_kernels
from r18_cupy.ops.relayout import Transpose
from r18_cupy.ops.softmax import Softmax
from r18_cupy.stem.few_channels import few_channels_kernels
from r18_cupy.stem.few_channels_mma import few_channels_mma_kernels
from r18_cupy.stem.few_channels_wgmma import few_channels_wgmma_kernels
from r18_cupy.stem.strips import MAX_SHARED_NBYTES

PRECISIONS: tuple[Precision, ...] = (FP32, FP16, BF16)
# They differ from fp32 only in products; ops without products use float32.
OF_PRODUCTS: tuple[Precision, ...] = (TF32, FP16X3)


@cache
def all_kernels() -> tuple[CudaKernel, ...]:
    return (
        *implicit_gemm_wgmma_kernels(),
        *implicit_gemm_wgmma_halo_kernels(),
        *implicit_gemm_wgmma_persistent_kernels(),
        *implicit_gemm_wgmma_pingpong_kernels(),
        *implicit_gemm_wgmma_stationary_kernels(),
        *projection_wgmma_kernels(),
        *implicit_gemm_mma_kernels(),
        *grouped_mma_kernels(),
        *winograd_kernels(),
        *winograd_one_launch_kernels(),
        *winograd_cluster_kernels(),
        *implicit_gemm_kernels(),
        *implicit_gemm_cluster_kernels(),
        *im2col_kernels(),
        *(DirectTiled(precision) for precision in PRECISIONS),
        *(Direct(precision) for precision in PRECISIONS),
        *direct_grouped_kernels(),
        *few_channels_wgmma_kernels(),
        *few_channels_mma_kernels(),
        *linear_wgmma_kernels(),
        *few_channels_kernels(),
        *(
            kernel
            for precision in (*PRECISIONS, TF32, FP16X3)
            for kernel in other_kernels(precision)
        ),
        *gap_linear_kernels(),
        *normalize_kernels((*PRECISIONS, *OF_PRODUCTS)),
        *float8_kernels(),
        *integer_kernels(),
        *stem_wgmma_kernels(),
    )


def kernels_for(capability: tuple[int, int] | None) -> tuple[CudaKernel, ...]:
    """The kernels that a device of this compute capability runs; all if it is not known."""
    if capability is None:
        return all_kernels()
    return tuple(
        kernel
        for kernel in all_kernels()
        if kernel.runs_on(capability) and has_shared_memory(kernel, capability)
    )


def has_shared_memory(kernel: CudaKernel, capability: tuple[int, int]) -> bool:
    """Whether such a device has the shared memory that a block of each tile needs (CUDA C++
    Programming Guide, "Technical Specifications per Compute Capability"). True as well if the need
    depends on the problem: those kernels refuse what does not fit.
    """
    if capability not in ((8, 6), (8, 9)) and capability[0] != 12:
        return True
    sizes = [getattr(tile, "shared_nbytes", None) for tile in getattr(kernel, "tiles", ())]
    return all(size <= MAX_SHARED_NBYTES for size in sizes if isinstance(size, int))


def other_kernels(precision: Precision) -> tuple[CudaKernel, ...]:
    """The kernels of all ops but convolutions; activations in both layouts, preferred kernels
    first.
    """
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
