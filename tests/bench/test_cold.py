"""Times with flushed caches: what is overwritten, when, and that flushing is not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from commands import r18
from r18.backend import Array, DeviceInfo
from r18.backend.host import HostMemory
from r18.backend.registry import load_backend
from r18.bench import timing
from r18.bench.baselines import PEER, torch_flush
from r18.bench.contenders import contenders
from r18.bench.inputs.cold import (
    BYTE,
    CPU_FACTOR,
    GPU_NBYTES,
    RUNS,
    Cold,
    flush_of,
    flushed_nbytes,
    host_flush,
)
from r18.bench.rows import PACES, Contender
from r18.bench.tables import cold_table
from r18.bench.timing import Rounds, bench
from r18.cpu import Cpu, model_slug
from r18.errors import UsageError
from r18.graph.resnet import resnet18
from support import random_weights

CPU = DeviceInfo("cpu", "a CPU")
GPU = DeviceInfo("cuda", "a GPU")
L3 = 32 << 20


class Bench:
    """Runners and flushes on a fake clock. A run after a flush takes twice as long."""

    def __init__(self) -> None:
        self.now, self.cold = 0.0, False
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def flush(self) -> None:
        self.log.append("flush")
        self.now += 100.0
        self.cold = True

    def contender(self, name: str, device: DeviceInfo = GPU, flushes: bool = True) -> Contender:
        def flush(nbytes: int) -> Callable[[], None]:
            self.log.append(f"{name} flushes {nbytes}")
            return self.flush

        made: Any = lambda: Runner(self, name)  # noqa: E731
        shape = (2, 3, 4, 4)
        own = flush if flushes else None
        return Contender(name, device, "fp32", "all", shape, made, flush=own)


class Runner:
    arena_nbytes = weight_nbytes = None
    kernels: ClassVar[dict[str, int]] = {}

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.name = bench, name

    def load(self, images: Array) -> None:
        self.bench.log.append(f"{self.name} loads")

    def run(self) -> None:
        self.bench.log.append(f"{self.name} runs")
        self.bench.now += 0.02 if self.bench.cold else 0.01
        self.bench.cold = False

    def time(self, clock: Callable[[], float]) -> float:
        begin = clock()
        self.run()
        return (clock() - begin) * 1e3

    def close(self) -> None: ...


def test_every_run_follows_a_flush_that_is_not_timed() -> None:
    stage = Bench()
    field = [stage.contender("a"), stage.contender(PEER)]
    reports: list[tuple[int, int]] = []
    rows = bench(
        field,
        warmup=0,
        repeat=12,
        cold=True,
        clock=stage.clock,
        progress=lambda what, done, total: reports.append((done, total)),
    )
    for found in rows:
        assert found.samples_ms == pytest.approx([10.0] * 12)
        assert found.cold is not None
        assert found.cold.samples_ms == pytest.approx([20.0] * 12)
        assert found.cold.nbytes == GPU_NBYTES
    assert stage.log.count("flush") == 24
    begin = stage.log.index(f"a flushes {GPU_NBYTES}")
    assert "flush" not in stage.log[:begin]
    runs = PACES["cuda"].runs
    turn = ["a loads", "a runs", *["flush", "a runs"] * runs]
    assert stage.log[begin + 1 : begin + 1 + len(turn)] == turn
    assert f"{PEER} flushes" not in " ".join(stage.log)  # one buffer for all of the device
    assert reports[-1][0] == reports[-1][1]


def test_no_more_runs_than_are_timed_otherwise_and_none_unless_asked() -> None:
    stage = Bench()
    assert Rounds(repeat=7, cold=True).cold_runs == 7
    assert Rounds(repeat=1000, series=3, cold=True).cold_runs == RUNS
    assert Rounds(repeat=7).cold_runs == 0
    (found,) = bench([stage.contender("a")], warmup=0, repeat=2, clock=stage.clock)
    assert found.cold is None
    assert "flush" not in stage.log


def test_the_first_contender_that_can_flushes_and_without_one_all_are_left_out() -> None:
    stage = Bench()
    field = [stage.contender("a", flushes=False), stage.contender("b")]
    bench(field, warmup=0, repeat=1, cold=True, clock=stage.clock)
    assert f"b flushes {GPU_NBYTES}" in stage.log
    skipped: list[str] = []
    (found,) = bench(
        field[:1],
        warmup=0,
        repeat=1,
        cold=True,
        clock=stage.clock,
        on_skip=lambda contender, error: skipped.append(f"{contender.name}: {error}"),
    )
    assert found.cold is None
    assert found.samples_ms
    assert skipped == ["a with overwritten caches: no contender can overwrite the device's caches"]


def test_a_device_without_room_for_the_buffer_keeps_its_other_times() -> None:
    stage = Bench()

    def full(nbytes: int) -> Callable[[], None]:
        raise MemoryError(f"no {nbytes} bytes left")

    (contender,) = [stage.contender("a")]
    object.__setattr__(contender, "flush", full)
    skipped: list[str] = []
    (found,) = bench(
        [contender],
        warmup=0,
        repeat=1,
        cold=True,
        clock=stage.clock,
        on_skip=lambda contender, error: skipped.append(str(error)),
    )
    assert (found.cold, skipped) == (None, [f"no {GPU_NBYTES} bytes left"])


# -- what is overwritten -----------------------------------------------------------------------


def test_the_buffer_is_larger_than_the_largest_cache() -> None:
    caches = {"L1d": 32 << 10, "L2": 1 << 20, "L3": L3}
    assert flushed_nbytes("cpu", caches) == CPU_FACTOR * L3 >= 2 * L3
    assert flushed_nbytes("cuda", {}) == GPU_NBYTES >= 4 * 126e6
    with pytest.raises(UsageError, match="does not tell the sizes of the CPU's caches"):
        flushed_nbytes("cpu", {})


def test_a_cpu_is_flushed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, made = Bench(), []

    def flush(nbytes: int) -> Callable[[], None]:
        made.append(nbytes)
        return stage.flush

    monkeypatch.setattr(timing, "cpu", lambda: Cpu("a CPU", 2, caches=(("L2", 1), ("L3", L3))))
    monkeypatch.setattr(timing, "host_flush", flush)
    field = [stage.contender("a", CPU)]
    (found,) = bench(field, warmup=0, repeat=2, cold=True, clock=stage.clock)
    assert made == [CPU_FACTOR * L3]
    assert found.cold == Cold(CPU_FACTOR * L3, found.cold.samples_ms if found.cold else ())
    assert not any("a flushes" in event for event in stage.log)


def test_flushes_write_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, buffers = HostMemory(), []
    empty = memory.empty
    monkeypatch.setattr(memory, "empty", lambda n: buffers.append(empty(n)) or buffers[-1])
    flush = flush_of(memory, 1000)
    flush()
    ((buffer),) = buffers
    assert buffer.nbytes == 1000
    assert set(buffer.array.tolist()) == {BYTE} != {0}

    arrays = []
    monkeypatch.setattr(
        np, "zeros", lambda n, kind: arrays.append(np.full(n, 0, kind)) or arrays[0]
    )
    flush = host_flush(800)
    flush()
    flush()
    assert arrays[0].nbytes == 800
    assert (arrays[0] == 2).all()


def test_pytorch_waits_for_its_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch waits until its fill of the cache has finished; the CPU stands in for the device."""
    filled: list[set[int]] = []
    buffers: list[torch.Tensor] = []
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        buffers.append(empty(*size, **options))
        return buffers[-1]

    monkeypatch.setattr("r18.bench.baselines.torchvision.place", lambda kind: "cpu")
    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: filled.append(set(buffers[0].tolist())))
    flush = torch_flush(1000)
    assert [buffer.nbytes for buffer in buffers] == [1000]
    flush()
    assert filled == [{BYTE}]


def test_backends_and_pytorch_can_flush_a_gpu_and_other_libraries_cannot() -> None:
    network = resnet18(image_size=32, classes=10)
    field = contenders(
        {"numpy": load_backend("numpy")}, network, random_weights(network), peers="all"
    )
    able = {one.name: one.flush is not None for one in field}
    assert able == {"numpy": True, PEER: True, "onnxruntime": False, "openvino": False}
    flush = field[0].flush
    assert flush is not None
    flush(64)()


# -- what is shown -----------------------------------------------------------------------------


def test_the_table_and_json_of_cold_times() -> None:
    stage = Bench()
    field = [stage.contender("a"), stage.contender(PEER)]
    rows = bench(field, warmup=0, repeat=3, cold=True, clock=stage.clock)
    data = json.loads(json.dumps(rows[0].to_json()))["cold"]
    assert data == {
        "nbytes": GPU_NBYTES,
        "runs": 3,
        "median_ms": pytest.approx(20.0),
        "p10_ms": pytest.approx(20.0),
        "p90_ms": pytest.approx(20.0),
    }
    line = " ".join(cold_table(rows).splitlines()[2].split())
    assert line == "a cuda fp32 2 20.00 20.00..20.00 100.0 2.00 1.00 537"
    (plain,) = bench([stage.contender("a")], warmup=0, repeat=1, clock=stage.clock)
    assert plain.to_json()["cold"] is None
    assert len(cold_table([plain]).splitlines()) == 2


def test_the_command_records_cold_times(tmp_path: Path) -> None:
    done = r18(
        *("bench", "--backends", "numpy,numba-cpu,r18_torch:cpu", "--network", "tiny"),
        *("--batch", 2, "--repeat", 3, "--cold", "--record", "--records", tmp_path),
    )
    assert done.code == 0, done.err
    assert "with caches overwritten before each run" in done.out
    assert "warm: each run reads the batch of the one before" in done.out
    (group,) = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text())["groups"].values()
    assert len(group["rows"]) == 3
    for row in group["rows"]:
        assert row["cold"]["runs"] == 3
        assert row["cold"]["median_ms"] > 0
        assert row["cold"]["nbytes"] >= 2 * max(group["machine"]["cpu"]["caches"].values())
