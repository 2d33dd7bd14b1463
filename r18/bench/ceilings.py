"""The highest rates of a device, measured on it: `ceilings-<device>.json`.

Where the backend measures them (`Backend.ceilings`), the rates of its instructions and memories.
Also the rates that a library reaches: of a large matrix product in each precision, and the
bandwidth of a large copy (bytes read plus bytes written). A CPU is measured with NumPy's BLAS and a
multithreaded copy, a GPU with PyTorch. Medians; inputs are random because products of zeros take
less power and run faster. Measure on an idle machine: `r18.bench.roofline` divides by the highest
of these numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from threadpoolctl import threadpool_limits

from r18 import records
from r18.backend import Ceiling, DeviceInfo
from r18.backend.ceilings import COPY
from r18.bench.roofline import WHAT, Ceilings
from r18.errors import BackendUnavailable, UsageError
from r18.machine import crowding, disturbances, machine, thread_count
from r18.records.kinds import (
    CeilingsRecord,
    CopyRate,
    Environment,
    Machine,
    MeasuredCeiling,
    Pace,
    Rate,
)

CPU_SIDE, CUDA_SIDE = 4096, 8192
"""Side of the square matrices, large enough that launch overhead does not count."""
CPU_NBYTES, CUDA_NBYTES = 512 << 20, 1 << 30
"""Bytes to copy: more than any cache holds."""
LEAST, MOST, SECONDS = 5, 50, 3.0
"""Runs of each: at least, at most, and seconds after which no further run starts."""
INT8_CAPABILITY = (7, 5)
"""The lowest compute capability on which PyTorch multiplies int8 matrices."""


def measure(
    device: DeviceInfo,
    *,
    side: int | None = None,
    nbytes: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    instructions: Callable[[], Iterable[Ceiling]] = tuple,
) -> CeilingsRecord:
    """The record of a device's ceilings.

    side, nbytes: of the matrices and the copied buffer; None for the device kind's default.
    instructions: measures them, as `Backend.ceilings` does; called when the library is done.
    progress:     called with a description of each measurement that starts.

    Raises `UsageError` for a simulated device or one of an unknown kind, `BackendUnavailable`
    where PyTorch is missing or sees no GPU.
    """
    if device.simulated or device.kind not in ("cpu", "cuda"):
        raise UsageError(
            f"{device} has no ceilings to measure: its times say nothing of hardware\n"
            "  r18 backends lists those that run on hardware"
        )
    host = machine()
    if device.kind == "cpu":
        of_library = dict(_cpu(side or CPU_SIDE, nbytes or CPU_NBYTES, progress))
    else:
        of_library = dict(_cuda(side or CUDA_SIDE, nbytes or CUDA_NBYTES, progress))
    copy = of_library.pop(COPY)
    rates, memory = _by_name(instructions())
    return CeilingsRecord(
        device=records.device_text(device),
        date=records.now(),
        environment=msgspec.convert(records.environment(device), Environment),
        machine=msgspec.convert(host, Machine),
        threads=thread_count() if device.kind == "cpu" else None,
        rates={name: Rate(*_rate(*times)) for name, times in of_library.items()},
        copy=CopyRate(*_rate(*copy)),
        instructions=rates or UNSET,
        memory=memory or UNSET,
    )


def _by_name(
    found: Iterable[Ceiling],
) -> tuple[dict[str, dict[str, MeasuredCeiling]], dict[str, MeasuredCeiling]]:
    """Instructions by precision and name, and memories by name."""
    instructions: dict[str, dict[str, MeasuredCeiling]] = {}
    memory: dict[str, MeasuredCeiling] = {}
    for one in found:
        named = instructions.setdefault(one.precision, {}) if one.precision else memory
        sustained, burst = (Pace(**asdict(pace)) for pace in (one.sustained, one.burst))
        named[one.what] = MeasuredCeiling(sustained, burst, one.how)
    return instructions, memory


MEASURE = "r18 roofline --measure"
"""The command that records the ceilings of a device."""


def read(folder: Path, device: DeviceInfo, command: str = MEASURE) -> Ceilings:
    """The recorded ceilings of a device; raises `UsageError` where there are none.

    command: what records them, for the message.
    """
    path = records.path_of(folder, WHAT, device)
    record = records.load(path, CeilingsRecord)
    if record is None:
        raise UsageError(
            f"there is no record of the ceilings of {device}: {path}\n"
            f"  measure it there while nothing else runs: {command}"
        )
    return Ceilings.from_record(record)


def warnings(record: CeilingsRecord) -> list[str]:
    """Why a record's numbers may be too low, in words."""
    host = msgspec.to_builtins(record.machine)
    return disturbances(host) + (crowding(host) if record.threads is not None else [])


Timed = tuple[float, list[float], str]
"""Units of work of a run, the seconds of each run, and a description."""


def _rate(work: float, seconds: list[float], how: str) -> tuple[float, float, int, str]:
    return work / statistics.median(seconds), work / min(seconds), len(seconds), how


def _runs(once: Callable[[], float]) -> list[float]:
    """The seconds of several runs, after one that does not count."""
    once()
    end = time.perf_counter() + SECONDS
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and time.perf_counter() < end):
        seconds.append(once())
    return seconds


# -- on a CPU ----------------------------------------------------------------------------------


def _cpu(side: int, nbytes: int, progress: Callable[[str], None]) -> Iterator[tuple[str, Timed]]:
    threads = thread_count()
    rng = np.random.default_rng(0)
    for name, dtype in (("fp32", np.float32), ("fp64", np.float64)):
        progress(f"matrix product, {name}")
        a, b = (rng.standard_normal((side, side)).astype(dtype) for _ in range(2))
        out = np.empty_like(a)
        with threadpool_limits(threads, user_api="blas"):
            seconds = _runs(partial(_clocked, partial(np.matmul, a, b, out=out)))
        how = f"NumPy {np.__version__}, matrix product {side}³, BLAS of {threads} threads"
        yield name, (2.0 * side**3, seconds, how)
    if find_spec("torch"):  # BLAS has no products of int8
        progress("matrix product, int8")
        yield "int8", _int8(side, threads)
    progress("copy")
    source = np.full(nbytes // 8, 1.5)
    target = np.zeros_like(source)
    edges = [len(source) * part // threads for part in range(threads + 1)]
    spans = [slice(a, b) for a, b in pairwise(edges)]
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            list(pool.map(lambda span: np.copyto(target[span], source[span]), spans))

        seconds = _runs(partial(_clocked, copy))
    how = f"NumPy {np.__version__}, copy of {source.nbytes} bytes by {threads} threads"
    yield COPY, (2.0 * source.nbytes, seconds, how)


def _int8(most: int, threads: int) -> Timed:
    """A product of int8 matrices by PyTorch, of side `most` unless that takes too long.

    Without instructions for bytes PyTorch multiplies one pair at a time, a hundred times as slowly.
    Then the side is halved until `LEAST` runs take no longer than `SECONDS`, at most to a 16th.
    """
    import torch

    made = torch.Generator().manual_seed(0)

    def product(side: int) -> Callable[[], float]:
        a, b = (
            torch.randint(-128, 128, (side, side), dtype=torch.int8, generator=made)
            for _ in range(2)
        )
        multiply = partial(torch._int_mm, a, b)
        multiply()  # the first call of a shape prepares it, which takes as long as large products
        return partial(_clocked, multiply)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        side = max(most // 16, 1)
        while 2 * side <= most and LEAST * 8 * product(side)() < SECONDS:
            side *= 2
        seconds = _runs(product(side))
    finally:
        torch.set_num_threads(before)
    how = f"PyTorch {torch.__version__}, matrix product {side}³, {threads} threads"
    return 2.0 * side**3, seconds, how


def _clocked(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# -- on a GPU ----------------------------------------------------------------------------------


def _cuda(side: int, nbytes: int, progress: Callable[[str], None]) -> Iterator[tuple[str, Timed]]:
    torch = _torch()

    def timed(work: Callable[[], object]) -> list[float]:
        def once() -> float:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            work()
            after.record()
            after.synchronize()
            return float(before.elapsed_time(after)) / 1e3

        return _runs(once)

    made = torch.Generator("cuda").manual_seed(0)
    kinds = {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp64": torch.float64,
        "int8": torch.int8,
    }
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for name, dtype in kinds.items():
            if name == "int8" and torch.cuda.get_device_capability() < INT8_CAPABILITY:
                continue
            progress(f"matrix product, {name}")
            a, b = (_random(torch, side, dtype, made) for _ in range(2))
            multiply = torch._int_mm if name == "int8" else torch.matmul
            b = b.t()  # int8 tensor cores take the second factor with its columns packed
            matmul.allow_tf32 = name == "tf32"
            seconds = timed(partial(multiply, a, b))
            how = f"PyTorch {torch.__version__}, matrix product {side}³"
            yield name, (2.0 * side**3, seconds, how)
    finally:
        matmul.allow_tf32 = before
    progress("copy")
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    how = f"PyTorch {torch.__version__}, copy of {nbytes} bytes"
    yield COPY, (2.0 * nbytes, timed(partial(target.copy_, source)), how)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable(
            "ceilings",
            f"PyTorch measures them, and does not import: {error}",
            "pip install 'r18[torch]'",
        ) from error
    if not torch.cuda.is_available():
        raise BackendUnavailable("ceilings", "PyTorch measures them, and sees no GPU")
    return torch


def _random(torch: Any, side: int, dtype: Any, made: Any) -> Any:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (side, side), dtype=dtype, device="cuda", generator=made)
    return torch.randn(side, side, device="cuda", generator=made).to(dtype)


__all__ = ["measure", "read", "warnings"]
