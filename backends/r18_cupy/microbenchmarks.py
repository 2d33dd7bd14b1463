"""Rates of single instructions and of memories, which `r18 roofline --measure` records of a GPU.

Each microbenchmark is a launch that repeats one instruction, or one kind of access, a given number
of times. Operands are random: products of zeros take less power and run faster. Operations
follow from what the CUDA source unrolls, and tests compare that with the compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from r18.backend import Array, Ceiling
from r18.backend.ceilings import COPY, Timed, measure
from r18_cupy.cuda import launch as launching
from r18_cupy.cuda.compiler import Entry, capability, compile_all
from r18_cupy.cuda.launch import OUT, Argument, GridLaunch, X

if TYPE_CHECKING:
    from r18_cupy.cuda.device import CupyBuffer, CupyMemory, CupyStream

LEAD = 20
"""A launch this many times shorter precedes the timed ones, which are enqueued while it runs.
Otherwise the first time would include host latency."""


Data = Callable[[int, np.random.Generator], Array]
"""A function that returns random operands of the given number of bytes."""


@dataclass(frozen=True)
class Device:
    """The facts that decide the launches."""

    capability: tuple[int, int]
    multiprocessors: int
    l2_nbytes: int


@dataclass(frozen=True)
class Microbenchmark:
    """One launch, on `blocks` blocks for each multiprocessor.

    work:     operations, or bytes, of a block in one repeat.
    data:     makes the random input, of `nbytes`; with `of_block`, each block has as many.
    output:   bytes that a block writes.
    extra:    arguments after input, output and repeats.
    """

    what: str
    precision: str
    entry: Entry
    how: str
    blocks: int
    threads: int
    work: int
    data: Data
    nbytes: int
    output: int
    of_block: bool = False
    shared_nbytes: int = 0
    extra: tuple[Argument, ...] = ()

    def runs_on(self, device: tuple[int, int]) -> bool:
        if self.entry.family is not None:
            return capability(self.entry.family) == device
        return device >= ((8, 0) if self.what == "mma.sync" else (7, 5))

    def launch(self, multiprocessors: int, repeats: int) -> GridLaunch:
        """The launch on a device with that many multiprocessors. Pure."""
        return GridLaunch(
            self.entry,
            (self.blocks * multiprocessors, 1, 1),
            (self.threads, 1, 1),
            (X, OUT, np.int32(repeats), *self.extra),
            self.shared_nbytes,
        )


# -- random operands ---------------------------------------------------------------------------


def _float32(nbytes: int, rng: np.random.Generator) -> Array:
    return rng.standard_normal(nbytes // 4, np.float32)


def _float16(nbytes: int, rng: np.random.Generator) -> Array:
    return rng.standard_normal(nbytes // 2, np.float32).astype(np.float16)


def _bfloat16(nbytes: int, rng: np.random.Generator) -> Array:
    """Random bfloat16 numbers as uint16, truncated from float32."""
    wide = rng.standard_normal(nbytes // 2, np.float32).view(np.uint32)
    return (wide >> 16).astype(np.uint16)


def _e4m3(nbytes: int, rng: np.random.Generator) -> Array:
    """Random e4m3 numbers as uint8: random signs and mantissas, magnitudes from 2⁻³ to 2."""
    signs_and_mantissas = rng.integers(0, 256, nbytes, np.uint8) & 0x87
    exponents = rng.integers(4, 8, nbytes, np.uint8)
    return signs_and_mantissas | exponents << 3


def _bytes(nbytes: int, rng: np.random.Generator) -> Array:
    return rng.integers(0, 256, nbytes, np.uint8)


def _uniform(nbytes: int, rng: np.random.Generator) -> Array:
    """Random float32 numbers in [0, 1)."""
    return rng.random(nbytes // 4, np.float32)


# -- the microbenchmarks -----------------------------------------------------------------------

FORMATS: dict[str, tuple[str, int, Data]] = {
    "fp16": ("__half", 2, _float16),
    "bf16": ("__nv_bfloat16", 2, _bfloat16),
    "tf32": ("float", 4, _float32),
    "int8": ("Bytes", 1, _bytes),
    "e4m3": ("E4m3", 1, _e4m3),
}
"""By format: the macro OPERAND of wgmma.cu and mma.cu, bytes of an operand, a function for
operands."""
K_NBYTES = 32
"""Bytes of K that one instruction of tensor cores multiplies."""


def _wgmma(precision: str) -> Microbenchmark:
    operand, itemsize, data = FORMATS[precision]
    rows, columns, warpgroups, k = 64, 256, 2, K_NBYTES // itemsize
    stages, row = 4, 128  # bytes of K
    nbytes = stages * (warpgroups * rows + columns) * row
    return Microbenchmark(
        "wgmma",
        precision,
        Entry("microbenchmarks/wgmma", "wgmma_products", (("OPERAND", operand),), "sm_90a"),
        f"wgmma m{rows}n{columns}k{k}, both operands in shared memory, {warpgroups} warpgroups",
        blocks=1,
        threads=128 * warpgroups,
        work=2 * rows * columns * k * stages * (row // K_NBYTES) * warpgroups,
        data=data,
        nbytes=nbytes,
        output=4 * 128 * warpgroups,
        shared_nbytes=nbytes,
    )


def _mma(precision: str) -> Microbenchmark:
    operand, itemsize, data = FORMATS[precision]
    k, threads, products = K_NBYTES // itemsize, 256, 32
    return Microbenchmark(
        "mma.sync",
        precision,
        Entry("microbenchmarks/mma", "mma_products", (("OPERAND", operand),)),
        f"mma.sync m16n8k{k}, operands in registers, 16 warps a multiprocessor",
        blocks=2,
        threads=threads,
        work=2 * 16 * 8 * k * products * (threads // 32),
        data=data,
        nbytes=4 * 24 * threads,
        output=4 * threads,
    )


_FMA = Microbenchmark(
    "fma",
    "fp32",
    Entry("microbenchmarks/fma", "fma_chains"),
    "FMA in float32, 16 chains a thread, 32 warps a multiprocessor",
    blocks=4,
    threads=256,
    work=2 * 256 * 256,
    data=_uniform,
    nbytes=4 * 17 * 256,
    output=4 * 256,
)
_COPY = Microbenchmark(
    COPY,
    "",
    Entry("microbenchmarks/copy", "copy_words"),
    "copy in device memory, 8 MiB for each multiprocessor, read and written",
    blocks=2,
    threads=1024,
    work=2 * 16 * 256 * 1024,
    data=_bytes,
    nbytes=16 * 256 * 1024,
    of_block=True,
    output=16 * 256 * 1024,
)
_SHARED = Microbenchmark(
    "shared-memory reads",
    "",
    Entry("microbenchmarks/shared_reads", "shared_reads"),
    "reads of shared memory, 16 bytes a thread, no bank conflicts",
    blocks=4,
    threads=256,
    work=16 * 12 * 256,
    data=_bytes,
    nbytes=16 * 12 * 256,
    output=4 * 256,
)


def _l2(l2_nbytes: int) -> Microbenchmark:
    """The largest power of two that is at most a quarter of the L2: a part of it may be far."""
    nbytes = 1 << max(16, (l2_nbytes // 4).bit_length() - 1)
    return Microbenchmark(
        "L2 reads",
        "",
        Entry("microbenchmarks/l2_reads", "l2_reads"),
        f"reads of {nbytes >> 20} MiB that stay in the L2, past the L1",
        blocks=2,
        threads=1024,
        work=16 * 8 * 1024,
        data=_bytes,
        nbytes=nbytes,
        output=4 * 1024,
        extra=(np.uint32(nbytes // 16 - 1),),
    )


def microbenchmarks(device: Device) -> tuple[Microbenchmark, ...]:
    """The microbenchmarks that a device supports. Pure."""
    every = (
        *map(_wgmma, FORMATS),
        *(_mma(name) for name in FORMATS if name != "e4m3"),  # has it from sm_89 on
        _FMA,
        _COPY,
        _l2(device.l2_nbytes),
        _SHARED,
    )
    return tuple(one for one in every if one.runs_on(device.capability))


# -- measuring ---------------------------------------------------------------------------------


def ceilings(
    memory: CupyMemory, stream: CupyStream, progress: Callable[[str], None]
) -> Iterator[Ceiling]:
    """The ceilings measured on the current device. progress: called as each measurement begins."""
    device = _device()
    every = microbenchmarks(device)
    progress("compiling microbenchmarks")
    compile_all([one.entry for one in every], device.capability)
    rng = np.random.default_rng(0)
    for one in every:
        progress(f"{one.what} {one.precision}".rstrip())
        blocks = one.blocks * device.multiprocessors
        data = one.data(one.nbytes, rng)
        if one.of_block:
            data = np.tile(data, blocks)
        source, target = memory.empty(data.nbytes), memory.empty(one.output * blocks)
        memory.upload(data, source)
        memory.fill(target, 0)
        sustained, burst = measure(_timer(one, device, source, target, stream), one.work * blocks)
        yield Ceiling(one.what, one.precision, sustained, burst, one.how)


def _timer(
    one: Microbenchmark,
    device: Device,
    source: CupyBuffer,
    target: CupyBuffer,
    stream: CupyStream,
) -> Timed:
    @lru_cache
    def bound(repeats: int) -> Callable[[], None]:
        enqueue = launching.LAUNCHER.bind([one.launch(device.multiprocessors, repeats)], ())
        inputs, handle = (source.address,), stream.cuda.ptr
        return lambda: enqueue(inputs, target.address, target.address, handle)

    def timed(repeats: int, count: int) -> list[float]:
        lead, run = bound(max(1, repeats // LEAD)), bound(repeats)
        lead()
        events = [stream.record()]
        for _ in range(count):
            run()
            events.append(stream.record())
        return [late.milliseconds_since(early) / 1e3 for early, late in pairwise(events)]

    return timed


def _device() -> Device:
    import cupy

    number = launching.LAUNCHER.device()
    facts = cupy.cuda.runtime.getDeviceProperties(number)
    version = facts["major"], facts["minor"]
    return Device(version, facts["multiProcessorCount"], facts["l2CacheSize"])


__all__ = ["Device", "Microbenchmark", "ceilings", "microbenchmarks"]
