"""Microbenchmarks without a GPU: their compiled loops, operands and rates."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import r18_cupy.cuda.launch as launching
from compiled import compile_now
from cuda_support import ARCHITECTURES, parameters
from r18_cupy import microbenchmarks as micro
from r18_cupy.cuda.compiler import capability, compile_entry, compile_ptx
from r18_cupy.cuda.h200 import MULTIPROCESSOR_NBYTES, RESERVED_NBYTES
from r18_cupy.cuda.launch import OUT, GridLaunch, X
from r18_cupy.microbenchmarks import Device, Microbenchmark, microbenchmarks
from r18_oracle.ptx.parse import Instruction, functions

HOPPER = Device((9, 0), 132, 50 << 20)
EVERY = microbenchmarks(HOPPER)
each = pytest.mark.parametrize("one", EVERY, ids=lambda one: f"{one.what} {one.precision}".rstrip())


def targets(one: Microbenchmark) -> list[str]:
    if one.entry.family:
        return [one.entry.family]
    return [name for name in ARCHITECTURES if one.runs_on(capability(name))]


def loop(one: Microbenchmark, target: str = "sm_90") -> list[Instruction]:
    """The instructions of the PTX's loop that loads, multiplies or copies."""
    (function,) = functions(compile_ptx(one.entry, one.entry.family or target))
    loops = [b.instructions for at, b in enumerate(function.blocks) if at in function.loop(at)]
    return max(loops, key=lambda found: sum(is_claimed(one, i) for i in found))


def is_claimed(one: Microbenchmark, instruction: Instruction) -> bool:
    claimed = {
        "wgmma": ("wgmma.mma_async",),
        "mma.sync": ("mma.sync",),
        "fma": ("fma.rn.f32",),
        "copy": ("ld.global", "st.global"),
        "L2 reads": ("ld.global.cg",),
        "shared-memory reads": ("ld.shared",),
    }
    return instruction.starts(*claimed[one.what])


# -- what is compiled --------------------------------------------------------------------------


@each
def test_it_compiles_without_spills_and_overlaps_its_products(one: Microbenchmark) -> None:
    assert targets(one)
    for target in targets(one):
        found = compile_now(one.entry, target)
        assert found.spill_nbytes == 0
        assert not found.serialized


OPERANDS = {
    "fp16": "f16.f16",
    "bf16": "bf16.bf16",
    "tf32": "tf32.tf32",
    "e4m3": "e4m3.e4m3",
}


@pytest.mark.parametrize("one", [b for b in EVERY if "mma" in b.what], ids=lambda b: b.entry.label)
def test_the_loop_of_products_has_as_many_as_are_counted(one: Microbenchmark) -> None:
    """The loop has as many products as are counted; wgmma may have several rounds, with commits."""
    found = loop(one)
    products = [i.opcode for i in found if is_claimed(one, i)]
    (opcode,) = set(products)
    m, n, k = map(int, re.search(r"m(\d+)n(\d+)k(\d+)", opcode).groups())  # type: ignore[union-attr]
    types = OPERANDS.get(one.precision, "s8.u8" if one.what == "wgmma" else "u8.s8")
    assert f".{types}" in opcode
    assert f"m{m}n{n}k{k}," in one.how
    if one.what == "wgmma":
        rounds = sum(i.starts("wgmma.commit_group") for i in found)
        assert sum(i.starts("wgmma.wait_group") for i in found) == rounds
        issuers = one.threads // 128
    else:
        rounds, issuers = 1, one.threads // 32
    assert one.work * rounds == 2 * m * n * k * len(products) * issuers


@pytest.mark.parametrize("one", [b for b in EVERY if "mma" not in b.what], ids=lambda b: b.what)
def test_the_other_loops_have_as_many_as_are_counted(one: Microbenchmark) -> None:
    found = [i for i in loop(one) if is_claimed(one, i)]
    if one.what == "fma":
        assert one.work == 2 * len(found) * one.threads
        return
    assert {bool(re.search(r"\.v4\.[ub]32", i.opcode)) for i in found} == {True}
    if one.what == "copy":  # its inner loop has a part of a repeat
        loads, stores = (sum(i.starts(f"{word}.global") for i in found) for word in ("ld", "st"))
        assert loads == stores > 0
        assert one.work == one.nbytes + one.output == 2 * one.output
        assert one.output % (16 * loads * one.threads) == 0
    else:
        assert one.work == 16 * len(found) * one.threads


@each
def test_what_is_computed_is_written(one: Microbenchmark) -> None:
    (function,) = functions(compile_ptx(one.entry, one.entry.family or "sm_90"))
    stores = [i for i in function.instructions if i.starts("st.global")]
    assert len(stores) == (4 if one.what == "copy" else 1)
    if one.what != "copy":
        assert one.output == 4 * one.threads


@each
def test_arguments_and_shared_memory_are_the_functions(one: Microbenchmark) -> None:
    launch = one.launch(HOPPER.multiprocessors, 7)
    assert launch.grid == (one.blocks * 132, 1, 1)
    x, out, *rest = launch.arguments
    assert (x, out, rest[0]) == (X, OUT, 7)
    declared = parameters(one.entry)
    assert declared[:2] == ["pointer", "pointer"]
    assert [type(argument) for argument in rest] == declared[2:]
    static = compile_entry(one.entry, one.entry.family or "sm_90").resources.shared_nbytes
    taken = one.blocks * (launch.shared_nbytes + static + RESERVED_NBYTES)
    assert taken <= MULTIPROCESSOR_NBYTES, "all blocks are resident at once"
    assert one.blocks * one.threads <= 2048


def test_a_device_runs_what_it_has_the_instructions_for() -> None:
    def named(device: tuple[int, int]) -> set[str]:
        return {one.what for one in microbenchmarks(Device(device, 40, 4 << 20))}

    plain = {"fma", "copy", "L2 reads", "shared-memory reads"}
    assert named((7, 5)) == plain
    assert named((8, 0)) == named((10, 0)) == plain | {"mma.sync"}
    assert named((9, 0)) == plain | {"mma.sync", "wgmma"}
    formats = {b.precision for b in EVERY if b.what == "wgmma"}
    assert formats == {"fp16", "bf16", "tf32", "int8", "e4m3"}


@pytest.mark.parametrize(("l2", "nbytes"), [(50 << 20, 8 << 20), (4 << 20, 1 << 20), (0, 1 << 16)])
def test_the_working_set_is_a_power_of_two_that_fits_in_the_l2(l2: int, nbytes: int) -> None:
    one = next(b for b in microbenchmarks(Device((9, 0), 132, l2)) if b.what == "L2 reads")
    assert one.nbytes == nbytes
    assert one.extra == (nbytes // 16 - 1,)


# -- operands ----------------------------------------------------------------------------------


@each
def test_operands_are_random_and_finite(one: Microbenchmark) -> None:
    data = one.data(one.nbytes, np.random.default_rng(1))
    assert data.nbytes == one.nbytes
    values = decoded(one, data)
    assert np.isfinite(values).all()
    assert values.std() > 0.25
    assert np.abs(values).max() <= 256
    assert len(np.unique(data.view(np.uint8))) > 30


def decoded(one: Microbenchmark, data: Any) -> Any:
    if one.precision == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    if one.precision == "e4m3":  # OCP 8-bit floating point: 1.m × 2^(e − 7); 0x7F is NaN
        assert not (data & 0x7F == 0x7F).any()
        exponent, mantissa = (data >> 3 & 15).astype(int), data & 7
        return np.where(data >> 7, -1, 1) * (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return data.astype(np.float64)


def test_chains_of_fma_stay_bounded_and_do_not_settle() -> None:
    """Chains of x = c − x² with c from 1.9 to 2, as in the CUDA source, stay bounded and move."""
    one = next(b for b in EVERY if b.what == "fma")
    data = one.data(one.nbytes, np.random.default_rng(1)).reshape(-1, one.threads)
    c, x = np.float32(1.9) + np.float32(0.1) * data[0], data[1:]
    for _ in range(2000):
        x = c - x * x
    assert np.abs(x).max() <= 2
    assert np.abs((c - x * x) - x).mean() > 0.5
    assert len(np.unique(x)) > 0.9 * x.size


# -- rates -------------------------------------------------------------------------------------


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("r18.backend.ceilings.time.sleep", found.append)
    return found


def test_the_device_s_facts_are_those_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"major": 8, "minor": 6, "multiProcessorCount": 28, "l2CacheSize": 3 << 20}
    runtime = SimpleNamespace(getDeviceProperties={1: facts}.__getitem__)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(launching, "LAUNCHER", SimpleNamespace(device=lambda: 1))
    assert micro._device() == Device((8, 6), 28, 3 << 20)


class Clock:
    """A stand-in for stream, launcher and memory: a repeat takes a microsecond."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(ptr=99)
        self.now = 0.0
        self.launches: list[tuple[GridLaunch, int, int]] = []
        self.filled: list[int] = []

    def record(self) -> Any:
        at = self.now
        event = SimpleNamespace(at=at)
        event.milliseconds_since = lambda earlier: 1e3 * (at - earlier.at)
        return event

    def bind(self, launches: Sequence[GridLaunch], weights: Sequence[Any]) -> Callable[..., None]:
        (launch,) = launches

        def enqueue(inputs: Sequence[int], output: int, workspace: int, stream: int) -> None:
            assert stream == 99
            self.launches.append((launch, *inputs, output))  # type: ignore[arg-type]
            self.now += 1e-6 * int(cast(np.int32, launch.arguments[2]))

        return enqueue

    def empty(self, nbytes: int) -> Any:
        return SimpleNamespace(address=nbytes, nbytes=nbytes)

    def upload(self, array: Any, buffer: Any) -> None:
        assert array.nbytes == buffer.nbytes
        assert array.any()

    def fill(self, buffer: Any, byte: int) -> None:
        self.filled.append(buffer.nbytes)


def test_every_microbenchmark_becomes_a_ceiling(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, messages, compiled = Clock(), [], []
    device = Device((9, 0), 2, 1 << 20)
    every = microbenchmarks(device)
    monkeypatch.setattr(launching, "LAUNCHER", clock)
    monkeypatch.setattr(micro, "_device", lambda: device)
    monkeypatch.setattr(micro, "compile_all", lambda entries, _: compiled.extend(entries))
    found = list(micro.ceilings(cast(Any, clock), cast(Any, clock), messages.append))
    assert [(one.what, one.precision) for one in found] == [(b.what, b.precision) for b in every]
    assert compiled == [b.entry for b in every]
    assert messages[1:] == [f"{b.what} {b.precision}".rstrip() for b in every]
    for ceiling, one in zip(found, every, strict=True):
        rate = one.work * one.blocks * device.multiprocessors / 1e-6
        assert ceiling.burst.per_second == pytest.approx(rate)
        assert ceiling.sustained.per_second == pytest.approx(rate)
        assert ceiling.how == one.how
    for launch, source, target in clock.launches:
        one = next(b for b in every if b.entry == launch.entry)
        blocks = one.blocks * device.multiprocessors
        assert source == one.nbytes * (blocks if one.of_block else 1)
        assert target == one.output * blocks
    assert clock.filled == [b.output * b.blocks * 2 for b in every]
