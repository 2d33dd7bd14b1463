"""Numba's CUDA backend: on a GPU where there is one, else in its simulator.

What kernels do to values is for `r18 verify`; here is what that cannot reach in the simulator: the
tiles of a GPU, which one is chosen, graphs, and how the simulator comes to be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import r18_numba
from r18.backend import CompileOptions, DeviceInfo
from r18.executor import make_plan, run_kernel
from r18.ops import Conv2d, Linear, Problem
from r18.precision import FP16, FP32, Precision
from r18.schedule import resnet18
from r18_numba.catalogue import all_kernels, filling, simulated_kernels
from r18_numba.conv import MOST_EXTENT, DirectConv, ImplicitGemm, Winograd
from r18_numba.kernel import NumbaKernel
from r18_numba.others import LINEAR_TILES, LinearKernel
from r18_numba.tile import LARGE, SMALL, TILES, TINY, WIDE, Tile
from r18_oracle.campaign import profile
from r18_oracle.corners import corners
from r18_oracle.reference import reference
from r18_oracle.verify import Request, suited
from support import output_of

SIMULATED = {"NUMBA_ENABLE_CUDASIM": "1"}


@pytest.fixture(scope="module")
def backend() -> r18_numba.Backend:
    found = r18_numba.Backend()
    found.probe()
    return found


# -- where it runs -----------------------------------------------------------------------------


def test_importing_it_and_listing_its_kernels_imports_no_numba() -> None:
    code = """
import sys, r18_numba
print(len(r18_numba.Backend().kernels()), "numba" in sys.modules)
"""
    assert output_of(code).split() == [str(len(all_kernels())), "False"]


@pytest.mark.parametrize("before", ["", "import numba"])
def test_the_simulator_is_used_when_it_is_asked_for_and_says_so(before: str) -> None:
    """Also by a process that has imported Numba for something else."""
    code = f"""
{before}
import r18_numba
backend = r18_numba.Backend()
device = backend.probe()
print(device, device.simulated, len(backend.kernels()), sep="|")
"""
    said = output_of(code, env=SIMULATED).strip()
    assert said == f"CUDA simulator (no GPU)|True|{len(simulated_kernels())}"


def test_without_a_gpu_the_simulator_is_chosen_though_numba_was_imported_before() -> None:
    code = """
import numba
from r18_numba import target
target.gpu_count = lambda: 0
import r18_numba
print(r18_numba.Backend().probe())
"""
    assert output_of(code).strip() == "CUDA simulator (no GPU)"


def test_a_gpu_that_is_not_there_is_told_with_the_remedy() -> None:
    code = """
from numba import cuda
from r18.errors import BackendUnavailable
from r18_numba import target
target.gpu_count = lambda: 0
import r18_numba
try:
    r18_numba.Backend().probe()
except BackendUnavailable as error:
    print(error.cause, error.remedy, sep="|")
"""
    assert output_of(code, env={"NUMBA_ENABLE_CUDASIM": "0"}).strip() == (
        "there is no GPU, and numba.cuda was imported before its simulator could be chosen|"
        "Set NUMBA_ENABLE_CUDASIM=1 in the environment."
    )


def test_a_simulated_device_is_asked_for_the_tiny_network_and_small_problems() -> None:
    asked = Request(profile("thorough"))
    assert suited(asked, DeviceInfo("cuda", "a GPU")) is asked
    given = suited(asked, DeviceInfo("cuda", "none", simulated=True))
    assert (given.network, given.profile.batches, given.profile.whole) == ("tiny", (1,), False)
    assert given.profile.max_macs < asked.profile.max_macs
    assert given == replace(asked, network="tiny", profile=given.profile)


# -- kernels -----------------------------------------------------------------------------------


def integers(problem: Problem) -> list[np.ndarray[Any, Any]]:
    """Inputs and weights of which every sum is exact, in any order: the result is then equal."""
    rng = np.random.default_rng(0)
    shapes = [*problem.inputs, *(spec.shape for spec in problem.op.weights())]
    # Winograd's filters divide by 4.
    return [rng.integers(-3, 4, shape) * (4.0 if len(shape) == 4 else 1.0) for shape in shapes]


def run_exactly(backend: r18_numba.Backend, kernel: NumbaKernel, problem: Problem) -> None:
    arrays = integers(problem)
    arity = problem.op.arity
    expected = reference(problem, tuple(arrays[:arity]), tuple(arrays[arity:]))
    np.testing.assert_array_equal(run_kernel(backend, kernel, problem, *arrays), expected)


@pytest.mark.parametrize(
    ("tile", "outputs", "width"), [(LARGE, 100, 13), (WIDE, 65, 7), (SMALL, 33, 13)], ids=str
)
def test_the_tiles_of_a_gpu_multiply_exactly_with_ragged_edges(
    backend: r18_numba.Backend, tile: Tile, outputs: int, width: int
) -> None:
    """They are too slow for the simulator's campaigns: one problem, several blocks, all exact."""
    plain = Conv2d(1, outputs, (3, 3), (1, 1), (1, 1), bias=True, relu=True)
    assert not ImplicitGemm(FP32, tile).simulates
    run_exactly(backend, ImplicitGemm(FP32, tile), Problem(plain, ((1, 1, 10, width),)))


def test_a_winograd_tile_of_a_gpu_multiplies_exactly(backend: r18_numba.Backend) -> None:
    op = Conv2d(3, 33, (3, 3), (1, 1), (0, 2), bias=True, residual=True)
    shape = (2, 3, 7, 4)
    output = replace(op, residual=False).infer(shape)
    run_exactly(backend, Winograd(FP32, SMALL), Problem(op, (shape, output)))


@pytest.mark.parametrize("tile", LINEAR_TILES, ids=str)
def test_linear_is_exact_across_tiles(backend: r18_numba.Backend, tile: tuple[int, int]) -> None:
    run_exactly(backend, LinearKernel(FP32, *tile), Problem(Linear(37, 17), ((3, 37),)))


@pytest.mark.parametrize("precision", [FP32, FP16], ids=str)
def test_phases_of_winograd_are_traced(backend: r18_numba.Backend, precision: Precision) -> None:
    from r18.executor import Launch, prepare_weights

    problem = Problem(Conv2d(1, 1, (3, 3)), ((1, 1, 3, 3),))
    kernel, memory, stream = Winograd(precision, TINY), backend.memory, backend.stream()
    launch = Launch(
        kernel,
        problem,
        (memory.empty(9 * precision.dtype.itemsize),),
        prepare_weights(kernel, problem, ["weight"], [np.ones((1, 1, 3, 3))]),
        memory.empty(precision.dtype.itemsize),
        memory.empty(kernel.workspace(problem)),
    )
    memory.fill(launch.inputs[0], 0)
    with stream.trace() as phases:
        launch.enqueue(stream)
    stream.synchronize()
    assert [phase for phase, _ in phases] == ["input transform", "sums", "output transform"]
    assert phases[2][1].milliseconds_since(phases[0][1]) >= 0


def test_threads_of_a_simulated_block_share_what_they_ask_for_at_once() -> None:
    """The simulator's own dictionary may give each an array of its own."""
    code = """
import threading
from r18_numba.simulator import Allocations
kept, start, got = Allocations(), threading.Barrier(8), []
def ask():
    start.wait()
    found = kept.get("line")
    if found is None:
        found = object()
        kept["line"] = found
    got.append(found)
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(got), len(set(map(id, got))))
"""
    assert output_of(code, env=SIMULATED).split() == ["8", "1"]


# -- refusals and choices ----------------------------------------------------------------------


def test_refusals_say_why() -> None:
    def said(kernel: NumbaKernel, op: Conv2d, *shape: int) -> str | None:
        return kernel.refusal(Problem(op, (shape,)))

    same = Conv2d(3, 8, (3, 3), (1, 1), (1, 1))
    assert said(ImplicitGemm(FP32, LARGE), same, 1, 3, 8, 8) is None
    assert said(ImplicitGemm(FP32, LARGE), same, 1, 3, MOST_EXTENT - 2, 1) is None
    assert said(ImplicitGemm(FP32, LARGE), same, 1, 3, MOST_EXTENT - 1, 1) == (
        "an extent of the padded image is more than 32,767"
    )
    assert said(DirectConv(FP32), same, 1, 3, MOST_EXTENT, 1) is None
    strided = replace(same, stride=(2, 1))
    assert said(Winograd(FP32, LARGE), strided, 1, 3, 8, 8) == "takes 3×3 windows of stride 1 alone"
    assert said(DirectConv(FP32), same, 2**20, 3, 32, 32) == (
        "a tensor has more than 2,147,483,647 elements"
    )
    assert said(Winograd(FP32, LARGE), same, 2**16, 3, 64, 16) == (
        "its patches or products have more than 2,147,483,647 elements"
    )
    assert LinearKernel(FP32, 16, 32).refusal(Problem(same, ((1, 3, 8, 8),))) == (
        "computes linear, not conv2d"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Tile(100, 128, 8, 8, 8),
        lambda: Tile(64, 60, 8, 8, 6),
        lambda: Tile(8, 128, 8, 8, 8),
        lambda: Tile(128, 128, 64, 8, 8),
    ],
)
def test_a_tile_that_cannot_be_is_refused(wrong: Callable[[], Tile]) -> None:
    with pytest.raises(ValueError, match=r"^m\d+n\d+k\d+: "):
        wrong()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_gpu_is_given_tiles_of_whole_warps(batch: int, precision: str) -> None:
    by_id = {kernel.id: kernel for kernel in all_kernels()}
    for name, problem in resnet18().problems(batch).items():
        chosen = filling(problem, precision, multiprocessors=132)
        if not isinstance(problem.op, Conv2d):
            assert chosen is None
            continue
        kernel = by_id[chosen or ""]
        assert isinstance(kernel, ImplicitGemm | Winograd), name
        assert kernel.tile in TILES
        assert kernel.tile is not TINY, name
        assert kernel.precision.name == precision
        assert kernel.refusal(problem) is None
        stride_1 = problem.op.kernel_size == (3, 3) and problem.op.stride == (1, 1)
        assert isinstance(kernel, Winograd) == stride_1, name


def test_every_corner_has_a_kernel_in_either_world() -> None:
    for kernels in (all_kernels(), simulated_kernels()):
        for op in {kernel.op for kernel in kernels}:
            for problem in corners(op, 4096, 400_000):
                assert any(kernel.refusal(problem) is None for kernel in kernels), str(problem)


def test_a_plan_of_resnet18_needs_no_device() -> None:
    plan = make_plan(r18_numba.Backend(), resnet18(), CompileOptions(batch=64))
    assert plan.kernel_ids()["layer1.0.conv1"].startswith("numba/conv2d/")


# -- graphs ------------------------------------------------------------------------------------


class Driver:
    """Stands in for `cuda.bindings.driver`: notes the calls, and refuses one by name."""

    class CUresult:
        CUDA_SUCCESS = 0

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = 2

    CUstream = staticmethod(int)

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[str] = []
        self.refuses = refuses

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            return (int(name == self.refuses), name)

        return call


CAPTURE = ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]


def test_a_graph_captures_once_and_launches_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from r18_numba import graph

    driver, worked = Driver(), []
    monkeypatch.setattr(graph, "driver", driver)
    captured = graph.Graph(7, lambda: worked.append(list(driver.calls)))
    assert worked == [["cuStreamBeginCapture"]]
    assert driver.calls == CAPTURE
    captured.launch()
    captured.launch()
    del captured
    assert driver.calls == [*CAPTURE, "cuGraphLaunch", "cuGraphLaunch", "cuGraphExecDestroy"]


@pytest.mark.parametrize("refused", CAPTURE[:3])
def test_a_driver_that_refuses_to_capture_is_told(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from r18_numba import graph

    driver = Driver(refused)
    monkeypatch.setattr(graph, "driver", driver)
    with pytest.raises(graph.GraphError, match="the CUDA driver answered 1"):
        graph.Graph(7, lambda: None)
    assert ("cuStreamEndCapture" in driver.calls) == (refused != "cuStreamBeginCapture")
    assert ("cuGraphDestroy" in driver.calls) == (refused == "cuGraphInstantiate")


def test_a_capture_that_raises_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from r18_numba import graph

    driver = Driver()
    monkeypatch.setattr(graph, "driver", driver)
    with pytest.raises(ZeroDivisionError):
        graph.Graph(7, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert driver.calls == CAPTURE[:2]
