"""CUDA C++ kernels, compiled by NVRTC and loaded through CuPy: `R18_BACKEND=cupy`.

Importing this package needs neither CuPy nor a device; `probe` is the first contact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from r18.backend import (
    Apart,
    Array,
    Ceiling,
    CompileOptions,
    DeviceInfo,
    Fastest,
    Kernel,
    Plan,
    Preferred,
    Stream,
    Table,
    find_table,
)
from r18.backend import Backend as BackendBase
from r18.errors import BackendUnavailable
from r18.graph.all_ops import CLASSIFIERS, SHORTCUTS
from r18.graph.ops import Conv2d, Problem
from r18.graph.precision import FP8, FP32, INT8
from r18.graph.scaled import ScaledConv2d
from r18.graph.schedule import Schedule
from r18.machine import has_cuda_driver
from r18_cupy.cuda.device import CupyMemory
from r18_cupy.kernel import CudaKernel, launches_of

if TYPE_CHECKING:
    from r18_cupy.cuda.program import CupyProgram

FEW_OUTPUTS = 2**18  # of a step that may run concurrently with another
FUSED_CLASSIFIER = {"fp32": 0, "tf32": 4, "fp16x3": 4}
"""The largest batch at which pooling and classifier are one launch where no table decides.

For formats of four bytes only. Each image's CTAs read its pixels and all weights again: from a few
images on that is more than two launches read. No batch was measured.
"""
TUNED = Path(__file__).parent / "tuned"  # tuning tables of measured devices
INSTALL = "pip install 'r18[cuda13]' (or 'r18[cuda12]' for a driver of CUDA 12)"


class Backend(BackendBase):
    """CUDA kernels on CuPy's current device."""

    name = "cupy"

    def __init__(self) -> None:
        # Known once the device has been probed.
        self._capability: tuple[int, int] | None = None
        self._tuned: Table | None = None

    @cached_property
    def memory(self) -> CupyMemory:
        return CupyMemory()

    def probe(self) -> DeviceInfo:
        cupy = _cupy()
        try:
            device = cupy.cuda.Device()
            facts = cupy.cuda.runtime.getDeviceProperties(device.id)
            driver = cupy.cuda.runtime.driverGetVersion()
        except Exception as error:  # CuPy raises a different error class for each CUDA library
            raise BackendUnavailable(
                self.name,
                f"CuPy {cupy.__version__} reaches no CUDA device: {error}",
                "Check the driver with nvidia-smi.",
            ) from error
        self._capability = facts["major"], facts["minor"]
        name = facts["name"].decode()
        capability = f"{facts['major']}.{facts['minor']}"
        details = {
            "cupy": cupy.__version__,
            "compute capability": capability,
            "driver's CUDA": f"{driver // 1000}.{driver % 1000 // 10}",
            "multiprocessors": str(facts["multiProcessorCount"]),
        }
        info = DeviceInfo("cuda", f"{name} (sm_{capability.replace('.', '')})", details)
        if self._tuned is None:
            self._tuned = find_table(self.name, info, TUNED)
        return info

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel; after `probe`, only those that run on the device."""
        from r18_cupy.catalogue import kernels_for  # it takes longer than all else here

        return kernels_for(self._capability)

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        """The choice of the probed device's tuning table. See `r18 tune`.

        Without an entry: `Apart` for a fused projection, which is slower for one image on an H200,
        and for a fused classifier at batches above `FUSED_CLASSIFIER`,
        `implicit_gemm_wgmma_stationary`, else `implicit_gemm_wgmma_pingpong`, where it should be
        the fastest by the estimates, in fp8
        `implicit_gemm_wgmma_halo` for a few images, else None.
        """
        found = self._tuned.best(problem, precision) if self._tuned else None
        if found is None and isinstance(problem.op, SHORTCUTS):
            return Apart()
        if (
            found is None
            and isinstance(problem.op, CLASSIFIERS)
            and problem.batch > FUSED_CLASSIFIER.get(precision, problem.batch)
        ):
            return Apart()
        if found is None and isinstance(problem.op, Conv2d):
            from r18_cupy.hopper.implicit_gemm_wgmma_pingpong import (
                implicit_gemm_wgmma_pingpong_kernels,
            )
            from r18_cupy.hopper.implicit_gemm_wgmma_stationary import (
                implicit_gemm_wgmma_stationary_kernels,
            )

            for stationary in implicit_gemm_wgmma_stationary_kernels():
                if stationary.precision.name == precision and stationary.pays(problem):
                    return Preferred(stationary.id)
            for kernel in implicit_gemm_wgmma_pingpong_kernels():
                if kernel.precision.name == precision and kernel.pays(problem):
                    return Preferred(kernel.id)
        if found is None and isinstance(problem.op, ScaledConv2d):
            from r18_cupy.float8.wgmma_halo import ScaledImplicitGemmWgmmaHalo

            halo = ScaledImplicitGemmWgmmaHalo()
            if halo.pays(problem):
                return Preferred(halo.id)
        return found

    def beside(self, first: Problem, second: Problem, precision: str) -> bool:
        """True where the second is small: then neither fills the device.

        On CUDA cores a larger one still fills what the first leaves idle at its end. In formats of
        one byte both at once were faster than one after the other at batches 4 to 16
        (docs/performance-log.md).
        """
        always = precision in (FP32.name, INT8.name, FP8.name)
        return always or math.prod(second.output) <= FEW_OUTPUTS

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> CupyProgram:
        """Compile a program that also takes and returns device arrays."""
        if self._capability is None:
            self.probe()  # a plan may only name kernels that the device runs
        return cast("CupyProgram", super().compile(schedule, weights, options))

    def program(self, plan: Plan, weights: Mapping[str, Array]) -> CupyProgram:
        """A program with copies during compute, and arrays on the device."""
        from r18_cupy.cuda.program import CupyProgram

        return CupyProgram(self, plan, weights)

    def variants(self, kernel: Kernel) -> tuple[Kernel, ...]:
        """A variant for each tile that is not a kernel of its own."""
        from r18_cupy.choices import variants_of

        return variants_of(cast(CudaKernel, kernel))

    def variant(self, kernel: Kernel, problem: Problem) -> Kernel | None:
        """The kernel with the tile that it chooses."""
        from r18_cupy.choices import variant_for

        return variant_for(cast(CudaKernel, kernel), problem)

    def prepare(self, calls: Iterable[tuple[Kernel, Problem]]) -> None:
        """Compile with NVRTC, on all cores."""
        from r18_cupy.cuda.compiler import compile_all
        from r18_cupy.cuda.launch import LAUNCHER

        entries = [
            launch.entry
            for kernel, problem in calls
            for launch in launches_of(cast(CudaKernel, kernel), problem)
        ]
        capability = LAUNCHER.capability(LAUNCHER.device())
        compile_all(entries, capability, perturbed=LAUNCHER.perturbation is not None)

    def perturb(self, seed: int | None, kinds: Collection[str] | None = None) -> tuple[str, ...]:
        """Delays warps and CTAs at the kernels' waits, arrivals and copies, and delays the host's
        copies; see `r18_cupy.cuda.perturb`.
        """
        from r18_cupy.cuda.copy_late import ENTRY
        from r18_cupy.cuda.launch import LAUNCHER
        from r18_cupy.cuda.perturb import KINDS, Perturbation

        LAUNCHER.perturb(None if seed is None else Perturbation.of(seed, kinds))
        LAUNCHER.function(ENTRY)  # now, since nothing can be loaded while a graph is captured
        return KINDS

    def ceilings(self, progress: Callable[[str], None]) -> tuple[Ceiling, ...]:
        """Tensor cores, FMA, and each memory; see `r18_cupy.microbenchmarks`."""
        _cupy()
        from r18_cupy.cuda.device import CupyStream
        from r18_cupy.microbenchmarks import ceilings

        return tuple(ceilings(self.memory, CupyStream(), progress))

    def stream(self) -> Stream:
        _cupy()
        from r18_cupy.cuda.device import CupyStream, OverlappingStream
        from r18_cupy.cuda.launch import LAUNCHER, OVERLAP_CAPABILITY

        overlaps = LAUNCHER.capability(LAUNCHER.device()) >= OVERLAP_CAPABILITY
        return OverlappingStream() if overlaps else CupyStream()


def _cupy() -> Any:
    """CuPy, if it and the compiler's packages import; raises `BackendUnavailable` otherwise.

    Without a driver CuPy is not imported, which takes as long as many a start on the CPU.
    """
    try:
        if find_spec("cupy") and not has_cuda_driver():
            raise BackendUnavailable(
                Backend.name,
                "there is no CUDA driver for CuPy",
                "Check the driver with nvidia-smi.",
            )
        import cupy

        import_module("cuda.core")  # needed to compile the first kernel
    except BackendUnavailable:
        raise
    except Exception as error:  # a missing driver raises more than ImportError
        raise BackendUnavailable(
            Backend.name, f"{type(error).__name__}: {error}", INSTALL
        ) from error
    return cupy


__all__ = ["Backend"]
