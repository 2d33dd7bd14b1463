"""Numba's CPU kernels: `R18_BACKEND=numba-cpu`. Channels last, on all of Numba's threads.

`compiled`       loads the compiled code on first use
`packing`        packs weights for the micro-kernel
`blocking`       blocks of products in bfloat16 and of bytes that fit in a core's cache
`conv_maxpool`   the same of a convolution with max pooling
`implicit_gemm`  convolution as a matrix product: cache blocking, arguments
`winograd`       convolution by F(4×4, 3×3): the same
`im2col`         convolution of several groups, or dilated: the same
`conv`           the convolution kernels, and which one a plan prefers
`others`         every other op
`integers`       quantised ops
`bfloat16`       every op in bfloat16
`assembly`       machine code, for `r18 kernels --assembly`
`microbenchmarks`  the rates of instructions
`emulation`      instructions to emulate where the CPU lacks them
`kernels/`       the code that Numba compiles

Importing this package does not import Numba. `probe` does.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib.metadata import version

from r18.backend import (
    Array,
    Ceiling,
    CompileOptions,
    DeviceInfo,
    Fastest,
    HostCode,
    Kernel,
    Preferred,
    Program,
)
from r18.backend import Backend as BackendBase
from r18.graph.ops import Problem
from r18.graph.schedule import Schedule
from r18_numba_cpu import assembly, bfloat16, conv, emulation, integers, microbenchmarks
from r18_numba_cpu.compiled import (
    NAME,
    CallStream,
    WorkerMemory,
    module,
    most_threads,
    vector,
)
from r18_numba_cpu.others import other_kernels


class Backend(BackendBase):
    """Kernels that Numba compiles for the machine it runs on."""

    name = NAME

    def __init__(self) -> None:
        self._missing: tuple[str, ...] | None = None  # unknown until it is probed

    def probe(self) -> DeviceInfo:
        lanes, threads = vector().LANES, most_threads()
        dots, amx, pairs = module("integers.dots"), module("amx"), module("bfloat16.pairs")
        has = {
            bfloat16.BY_AMX: amx.AVAILABLE and amx.HAS_BFLOAT16,
            bfloat16.BY_PAIRS: pairs.AVAILABLE,
            integers.BY_AMX: amx.AVAILABLE,
            integers.BY_VNNI: dots.HAS_VNNI,
            integers.BY_WORDS: dots.HAS_WORDS,
        }
        self._missing = tuple(ending for ending, is_there in has.items() if not is_there)
        details = {"numba": version("numba"), "lanes": str(lanes), "threads": str(threads)}
        details["avx512_bf16"] = "yes" if pairs.AVAILABLE else "no"
        details["vnni"] = _has(dots.HAS_VNNI, dots.EMULATED)
        details["amx"] = f"{_has(amx.AVAILABLE, amx.EMULATED)}{amx.REFUSAL and ': '}{amx.REFUSAL}"
        details["amx_bf16"] = "yes" if has[bfloat16.BY_AMX] else "no"
        words = f"{threads} thread{'s' * (threads != 1)}, vectors of {lanes}"
        words += ", AVX512-BF16" if pairs.AVAILABLE else ", no AVX512-BF16"
        words += ", VNNI" if dots.HAS_VNNI else ", no VNNI"
        words += ", AMX" if amx.AVAILABLE else amx.REFUSAL and f", no AMX ({amx.REFUSAL})"
        names = [name for name, one in (("VNNI", dots), ("AMX", amx)) if one.EMULATED]
        words += f" ({' and '.join(names)} emulated)" if names else ""
        name = f"CPU ({platform.machine()}), Numba {details['numba']}, {words}"
        return DeviceInfo("cpu", name, details, simulated=bool(names))

    def simulates(self) -> bool:
        """Whether instructions may be emulated: the environment asks for it."""
        return bool(emulation.requested())

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel; after `probe`, only those that this CPU runs."""
        return without(_kernels(), *self._missing) if self._missing else _kernels()

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        """Winograd where it pays; see `conv`, `bfloat16` and `integers`."""
        kernel = None
        if precision == "fp32":
            kernel = conv.fastest(problem)
        elif precision == "bf16":
            kernel = bfloat16.fastest(problem, self.kernels())
        elif precision == "int8":
            kernel = integers.fastest(problem, self.kernels())
        return None if kernel is None else Preferred(kernel)

    def host_code(self, kernel: Kernel, problem: Problem) -> HostCode | None:
        """The machine code of convolution and linear kernels; see `r18_numba_cpu.assembly`."""
        return assembly.host_code(kernel, problem)

    @cached_property
    def memory(self) -> WorkerMemory:
        return WorkerMemory()

    def stream(self) -> CallStream:
        return CallStream()

    def ceilings(self, progress: Callable[[str], None]) -> tuple[Ceiling, ...]:
        """The rates of multiply-add and of this CPU's other multiplications, on all threads."""
        return tuple(microbenchmarks.ceilings(progress))

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> Program:
        if self._missing is None:
            self.probe()  # a plan may only name kernels that the CPU runs
        return super().compile(schedule, weights, options)


def _has(available: bool, emulated: bool) -> str:
    return "emulated" if emulated else "yes" if available else "no"


def without(kernels: tuple[Kernel, ...], *endings: str) -> tuple[Kernel, ...]:
    """The kernels without those whose algorithm and precision have one of these endings."""
    return tuple(k for k in kernels if not f"{k.algorithm}/{k.precision}".endswith(endings))


@cache
def _kernels() -> tuple[Kernel, ...]:
    return (
        *conv.conv_kernels(),
        *other_kernels(),
        *bfloat16.bfloat16_kernels(),
        *integers.integer_kernels(),
    )


__all__ = ["Backend", "without"]
