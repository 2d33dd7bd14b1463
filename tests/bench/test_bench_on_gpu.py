"""`r18 bench` compared with a plain loop. On a GPU."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from r18.backend import CompileOptions
from r18.bench.baselines import PEER
from r18.bench.error import FLOAT64
from r18.bench.rows import PACES
from r18.bench.run import Request
from r18.bench.run import run as run_bench
from r18.bench.timing import Rounds, random_images
from r18.errors import BackendUnavailable
from r18.graph.resnet import resnet18
from r18.weights import load_weights
from r18_cupy import Backend

APART = 0.03
"""The largest relative difference between the two timings."""
ROUNDS = 3
"""Rounds in which the two take turns, so that a drifting clock changes both."""
WARM_UP, RUNS = 20, 100
CELLS = (
    *(("fp16", 1), ("fp16", 8), ("fp16", 64), ("fp16", 256)),
    *(("tf32", 8), ("fp16x3", 64), ("fp32", 1), ("fp32", 64)),
)


@pytest.fixture(scope="module")
def backend() -> Backend:
    found = Backend()
    try:
        device = found.probe()
    except BackendUnavailable as error:
        pytest.skip(f"needs a GPU: {error.cause}")
    assert device.kind == "cuda"
    return found


def loop_ms(backend: Backend, precision: str, batch: int) -> list[float]:
    """Milliseconds of each launch by CUDA events of CuPy's own, in a plain loop.

    It warms up as long as a turn of the benchmark does: in fp16 the H200 reaches its power limit
    after some 0.05 s of launches, and is 6 to 10 % slower from then on.
    """
    import cupy

    network = resnet18()
    weights = load_weights("synthetic", network)
    options = CompileOptions(batch=batch, precision=precision)
    program: Any = backend.compile(network, weights, options)
    stream = program.stream.cuda
    program.load(random_images((batch, 3, 224, 224), 1)[0])
    warm = time.perf_counter() + PACES["cuda"].settle
    while time.perf_counter() < warm:
        program.launch()
        program.synchronize()
    found = []
    for _ in range(RUNS):
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        before.record(stream)
        program.launch()
        after.record(stream)
        after.synchronize()
        found.append(float(cupy.cuda.get_elapsed_time(before, after)))
    program.close()
    return found


@pytest.fixture
def times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the errors, whose reference takes seconds on the CPU."""
    monkeypatch.setattr("r18.hooks.entry_points", lambda group: [])


@pytest.mark.usefixtures("times_alone")
@pytest.mark.parametrize(("precision", "batch"), CELLS)
def test_the_benchmark_agrees_with_a_plain_loop(
    backend: Backend, precision: str, batch: int
) -> None:
    rounds = Rounds(warmup=WARM_UP, repeat=RUNS)
    request = Request(["cupy"], [precision], [batch], rounds)
    benched: list[float] = []
    looped: list[float] = []
    for _ in range(ROUNDS):
        row = next(row for row in run_bench(request).rows if row.backend == "cupy")
        benched.append(row.median_ms)
        looped.append(statistics.median(loop_ms(backend, precision, batch)))
    ours, theirs = statistics.median(benched), statistics.median(looped)
    print(f"{precision}, batch {batch}: r18 bench {ours:.5f} ms, a plain loop {theirs:.5f} ms")
    assert abs(ours / theirs - 1) <= APART, f"r18 bench {benched} ms, a plain loop {looped} ms"


@pytest.mark.usefixtures("times_alone")
def test_a_flushed_l2_costs_time(backend: Backend) -> None:
    """A run with cold caches takes longer: the weights, half of the L2, come from memory."""
    request = Request(["cupy"], ["fp16"], [1], Rounds(warmup=WARM_UP, repeat=RUNS, cold=True))
    row = next(row for row in run_bench(request).rows if row.backend == "cupy")
    assert row.cold is not None
    print(f"fp16, batch 1: warm {row.median_ms:.5f} ms, cold {row.cold.median_ms:.5f} ms")
    assert row.cold.median_ms > row.median_ms


def test_errors_are_of_the_order_of_pytorchs(backend: Backend) -> None:
    """Errors are of PyTorch's order of magnitude: both round stored values to half precision."""
    request = Request(["cupy"], ["fp16"], [8], Rounds(warmup=1, repeat=5))
    rows = {row.backend: row for row in run_bench(request).rows}
    if PEER not in rows:
        pytest.skip("needs PyTorch with CUDA and torchvision")
    error = rows["cupy"].error
    assert error is not None
    assert (error.images, error.reference) == (8, FLOAT64)
    assert 1e-4 < error.relative < 1e-1
    ratio = rows["cupy"].error_ratio
    assert ratio is not None
    assert 0.1 < ratio < 2
