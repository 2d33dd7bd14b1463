"""Numba's CUDA backend: on a GPU where there is one, else in its simulator.

`r18 verify` tests the values of kernels; here is what it cannot reach in the simulator: the
tiles of a GPU, which one is chosen, graphs, and how the simulator comes to be used.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import numba_compiled
import r18_numba
from r18.backend import Array, CompileOptions, DeviceInfo
from r18.backend.registry import load_backend
from r18.graph.ops import Conv2d, Linear, Problem
from r18.graph.precision import FP16, FP32, Precision
from r18.graph.resnet import resnet18
from r18.runtime.launch import run_kernel
from r18.runtime.plan import make_plan
from r18_numba.catalogue import all_kernels, filling, simulated_kernels
from r18_numba.conv import MOST_EXTENT, DirectConv, ImplicitGemm, Winograd
from r18_numba.kernel import DEVICE, SOURCES, NumbaKernel
from r18_numba.others import LINEAR_TILES, LinearKernel
from r18_numba.races import Race
from r18_numba.tile import LARGE, SMALL, TILES, TINY, WIDE, Tile
from r18_oracle.generate.corners import corners
from r18_oracle.judge.reference import reference
from r18_oracle.search import records as evidence
from r18_oracle.search.profiles import profile
from r18_oracle.search.verify import Request, suited
from support import output_of

SIMULATED = {"NUMBA_ENABLE_CUDASIM": "1"}
IGNORED = shutil.ignore_patterns("__pycache__")


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
    """The simulator runs if requested, even in a process that has already imported Numba."""
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


def test_a_simulator_without_greenlet_is_told_with_the_remedy() -> None:
    code = """
import sys
sys.modules["greenlet"] = None
from r18.errors import BackendUnavailable
import r18_numba
try:
    r18_numba.Backend().probe()
except BackendUnavailable as error:
    print(error.cause, error.remedy, sep="|")
"""
    assert output_of(code, env=SIMULATED).strip() == (
        "its simulator needs greenlet: import of greenlet halted; None in sys.modules|"
        "pip install 'r18[numba]', and for a GPU 'numba-cuda[cu13]'"
    )


def test_a_simulated_device_is_asked_for_the_tiny_network_and_small_problems() -> None:
    asked = Request(profile("thorough"))
    assert suited(asked, DeviceInfo("cuda", "a GPU")) is asked
    given = suited(asked, DeviceInfo("cuda", "none", simulated=True))
    assert (given.network, given.profile.batches, given.profile.whole) == (
        "tiny:image_size=24",
        (1,),
        False,
    )
    assert given.profile.max_macs < asked.profile.max_macs
    assert given == replace(asked, network=given.network, profile=given.profile)


# -- kernels -----------------------------------------------------------------------------------


def integers(problem: Problem) -> list[np.ndarray[Any, Any]]:
    """Inputs and weights whose sums are exact in any order, so that results are equal."""
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
    """A GPU's tiles, too slow for the simulator's campaigns, multiply exactly at ragged edges."""
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
    from r18.backend import Launch, prepare_weights

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


# -- the simulator -----------------------------------------------------------------------------


def simulate(backend: r18_numba.Backend, name: str, out: Array, *arguments: int) -> Array:
    """The array that a kernel of `simulated` leaves, run with as many blocks as it has rows."""
    import simulated

    buffer = backend.memory.empty(out.nbytes)
    backend.memory.upload(out, buffer)
    grid, block = (len(out), 1, 1), (simulated.THREADS, 1, 1)
    stream = backend.stream()
    stream.launch(  # type: ignore[attr-defined]
        getattr(simulated, name), grid, block, buffer.as_array(out.dtype.type), *arguments
    )
    stream.synchronize()
    found: Array = backend.memory.download(buffer, out.shape, out.dtype)
    return found


def test_threads_of_a_simulated_block_take_turns_in_a_known_order(
    backend: r18_numba.Backend,
) -> None:
    """Threads run forwards to a barrier, then backwards; odd blocks the other way around."""
    found = simulate(backend, "noting", np.zeros((2, 13), np.int32)).ravel()
    assert found[0] == 24
    forwards, backwards = [0, 1, 2, 3], [3, 2, 1, 0]
    assert found[1:13].tolist() == [*forwards, *backwards, *forwards]
    assert found[13:25].tolist() == [*backwards, *forwards, *backwards]


@pytest.mark.parametrize("step", [1, 3])
def test_a_missing_barrier_shows_in_every_run(backend: r18_numba.Backend, step: int) -> None:
    """Without a barrier some threads read too early in every run, whichever neighbour they read."""
    right = (np.arange(4) + step) % 4
    nothing = np.zeros((2, 4), np.float32)
    np.testing.assert_array_equal(
        simulate(backend, "passing_on", nothing, step, 1), np.stack([right, right])
    )
    for _ in range(3):
        with pytest.raises(Race, match=r"of a shared array that .*, with no barrier"):
            simulate(backend, "passing_on", nothing, step, 0)


def test_an_early_read_gets_no_number(
    backend: r18_numba.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks that are not watched, a read that comes too early gets NaN."""
    monkeypatch.setattr("r18_numba.simulator.Watched", lambda array, block: array)
    runs = [simulate(backend, "passing_on", np.zeros((2, 4), np.float32), 1, 0) for _ in range(3)]
    assert all(np.isnan(run).any(axis=1).all() for run in runs)
    assert len({run.tobytes() for run in runs}) == 1


@pytest.mark.parametrize(
    ("name", "right", "said"),
    [
        ("adding", [[6, 0, 0, 0]], r"thread 2 used element 0 of .* thread 3 wrote to, with no"),
        ("overwriting", [[1, 1, 1, 1]], r"element \(0, 0\) of .* other threads read, with no"),
    ],
)
def test_a_race_between_two_barriers_is_found(
    backend: r18_numba.Backend, name: str, right: list[list[int]], said: str
) -> None:
    """A race is found even if running one thread after another gives the right result."""
    assert simulate(backend, name, np.zeros((1, 4), np.float32), 1).tolist() == right
    with pytest.raises(Race, match=said):
        simulate(backend, name, np.zeros((1, 4), np.float32), 0)


def test_a_barrier_does_not_wait_for_threads_that_are_done(backend: r18_numba.Backend) -> None:
    found = simulate(backend, "leaving_early", np.zeros((1, 4), np.float32))
    assert found.tolist() == [[6, 1, 2, 3]]


def test_memory_of_a_simulated_block_is_new_and_holds_no_number(
    backend: r18_numba.Backend,
) -> None:
    found = simulate(backend, "unwritten", np.zeros((3, 2), np.float32))
    assert np.isnan(found[:, 0]).all()
    assert (found[:, 1] == -1).all()


def test_a_thread_that_raises_ends_the_block_and_leaves_nothing_behind(
    backend: r18_numba.Backend,
) -> None:
    before = threading.enumerate()
    with pytest.raises(ZeroDivisionError, match=r"tid=\[1, 0, 0\] ctaid=\[0, 0, 0\]: on purpose"):
        simulate(backend, "failing", np.zeros((1, 1), np.float32))
    assert threading.enumerate() == before
    assert simulate(backend, "leaving_early", np.zeros((1, 4), np.float32))[0, 0] == 6


@pytest.mark.parametrize("everywhere", [False, True])
def test_kernels_are_traced_as_new_threads_are(
    backend: r18_numba.Backend, everywhere: bool
) -> None:
    """Kernels are traced as new threads are, not by the launching thread's own trace function."""
    seen: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        seen.append(frame.f_code.co_name)

    before = sys.gettrace()
    threading.settrace(trace if everywhere else None)  # type: ignore[arg-type]
    sys.settrace(trace)
    try:
        simulate(backend, "leaving_early", np.zeros((1, 4), np.float32))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
    assert seen.count("leaving_early") == (4 if everywhere else 0)
    assert "launch" in seen


# -- builders of device code -------------------------------------------------------------------

VALUES: dict[str, tuple[Any, Any]] = {
    "storage": (np.float32, np.float16),
    "number": (np.float32, np.int32),
    "tile": (TINY, SMALL),
    "side": (4, 8),
    "depth": (16, 32),
}
"""Two values of each argument of a builder."""


def builders() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The module, name and arguments of every builder, from the sources."""
    for path in sorted(DEVICE.glob("*/*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("build"):
                arguments = tuple(argument.arg for argument in node.args.args)
                yield f"{path.parent.name}.{path.stem}", node.name, arguments


@pytest.mark.parametrize(("module", "name", "arguments"), list(builders()))
def test_each_builder_keeps_a_function_for_each_argument(
    backend: r18_numba.Backend, module: str, name: str, arguments: tuple[str, ...]
) -> None:
    """A builder keeps a function per argument, or kernels would run another tile's code."""
    build = getattr(import_module(f"r18_numba.kernels.{module}"), name)
    every = list(product(*(VALUES[argument] for argument in arguments)))
    built = [build(*values) for values in every]
    assert len({id(function) for function in built}) == len(every)
    assert [build(*values) for values in every] == built


# -- what a GPU compiles -----------------------------------------------------------------------


def test_every_kernel_compiles_for_a_gpu_and_keeps_its_arrays_in_registers() -> None:
    """Every kernel compiles for a GPU; the simulator hides types that Numba cannot infer."""
    if (rows := numba_compiled.made("floats")) is None:
        pytest.skip("no libnvvm: pip install 'numba-cuda[cu13]' brings it")
    assert {row[0] for row in rows} >= {
        *("direct_conv", "implicit_gemm", "winograd_input", "winograd_sums", "winograd_output"),
        *("tiled_linear", "batchnorm", "relu", "add", "maxpool", "gap", "softmax", "normalize"),
    }
    assert {tuple(row[1:]) for row in rows} == {("True", "False")}


# -- what a record knows a kernel by -----------------------------------------------------------


def test_a_kernel_is_known_by_the_modules_that_it_is_made_of() -> None:
    kernel = ImplicitGemm(FP32, LARGE)
    assert kernel.digest is not None
    assert not kernel.targets
    names = {
        type(k): sorted(path.name for path in k.source_files)
        for k in all_kernels()
        if k.source_files
    }
    assert len(names) == len({type(k) for k in all_kernels()})
    assert names[ImplicitGemm] == [
        *("implicit_gemm.py", "jit.py", "main_loop.py", "tile_product.py")
    ]
    assert names[Winograd] == ["jit.py", "tile_product.py", "winograd.py"]
    assert names[DirectConv] == ["direct.py", "jit.py"]
    host = [path.name for path in SOURCES.files(ImplicitGemm) if not path.is_relative_to(DEVICE)]
    assert host == ["conv.py", "kernel.py", "tile.py"]
    digests = [k.digest for k in all_kernels()]
    assert len(set(digests)) == len(digests)


def copied_package(folder: Path) -> Path:
    package = folder / "r18_numba"
    shutil.copytree(Path(r18_numba.__file__).parent, package, ignore=IGNORED)
    return package


def digests(package: Path, changed: str = "") -> dict[str, str]:
    """Each kernel's digest, in a new process with the package, after a change of a module."""
    if changed:
        with (package / changed).open("a") as stream:
            stream.write("CHANGED = True\n")
    code = """
import json, r18_numba
print(r18_numba.__file__)
print(json.dumps({k.id: k.digest for k in r18_numba.Backend().kernels()}))
"""
    file, found = output_of(code, path=[package.parent]).splitlines()
    assert Path(file).parent == package
    read: dict[str, str] = json.loads(found)
    return read


def test_a_copy_of_the_package_has_the_same_digests(tmp_path: Path) -> None:
    assert digests(copied_package(tmp_path)) == {k.id: k.digest for k in all_kernels()}


@pytest.mark.parametrize(
    ("module", "stale"),
    [
        # The module of integer convolutions imports the implicit GEMM of floats for its host code,
        # and so counts it.
        (
            "kernels/conv/tile_product.py",
            {
                *("conv2d/implicit_gemm", "conv2d/winograd_f2x2"),
                *("qconv2d/implicit_gemm", "qconv2d/direct"),
            },
        ),
        ("kernels/ops/pooling.py", {"gap/tree", "maxpool2d/direct"}),
        (
            "kernels/conv/main_loop.py",
            {"conv2d/implicit_gemm", "qconv2d/implicit_gemm", "qconv2d/direct"},
        ),
        ("kernels/ops/linear.py", {"linear/tiled", "qlinear/tiled"}),
        ("kernels/integers/linear.py", {"qlinear/tiled"}),
        (
            "conv.py",
            {
                *("conv2d/implicit_gemm", "conv2d/winograd_f2x2", "conv2d/direct"),
                *("qconv2d/implicit_gemm", "qconv2d/direct"),
            },
        ),
        (
            "kernels/integers/requantize.py",
            {
                *("qconv2d/implicit_gemm", "qconv2d/direct", "qlinear/tiled"),
                *("qmaxpool2d/direct", "qgap/tree", "qrelayout/transpose"),
                *("quantize/divide", "quantize_pixels/table"),
            },
        ),
        ("device.py", set()),
    ],
)
def test_a_changed_module_makes_the_kernels_stale_that_it_is_part_of(
    module: str, stale: set[str], tmp_path: Path
) -> None:
    """A changed module, in a copy of the package, makes exactly its own kernels' records stale."""
    after = digests(copied_package(tmp_path), module)
    entries = {
        name: SimpleNamespace(verified=True, digest=digest, findings=[])
        for name, digest in after.items()
    }
    record = SimpleNamespace(kernels=entries)
    reasons = evidence.stale(load_backend("numba"), all_kernels(), [record])
    assert set(reasons.values()) <= {"has changed since it was verified"}
    by_id = {kernel.id: kernel for kernel in all_kernels()}
    found = {f"{by_id[name].op.name}/{by_id[name].algorithm}" for name in reasons}
    assert found == stale


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
    assert said(Winograd(FP32, LARGE), strided, 1, 3, 8, 8) == "takes 3×3 windows of stride 1 only"
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


def test_the_simulators_tile_is_shaped_as_those_of_a_gpu() -> None:
    """The simulator's tile has no factor of 1, whose mistakes would not show in the simulator."""
    assert TINY.rows // TINY.row_vector > 1
    assert TINY.columns // TINY.column_vector > 1
    assert TINY.row_vector > 1
    assert TINY.row_step > 1
    assert TINY.k // TINY.row_step > 2
    assert TINY.m != TINY.n
    # Mutants that take one for the other are judged equivalent while this holds.
    assert all(tile.rows == tile.columns for tile in TILES)


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
    """Groups and dilation have one kernel that takes them; all others refuse them by name."""
    for kernels in (all_kernels(), simulated_kernels()):
        for op in {kernel.op for kernel in kernels}:
            for problem in corners(op, 4096, 400_000):
                refusals = [k.refusal(problem) for k in kernels if k.op is op]
                assert None in refusals, str(problem)
                if extras := problem.op.extras:
                    (name, value), *_ = extras.items()
                    assert set(refusals) == {None, f"computes no {op.name} with {name}={value}"}


def test_a_plan_of_resnet18_needs_no_device() -> None:
    plan = make_plan(r18_numba.Backend(), resnet18(), CompileOptions(batch=64))
    assert plan.kernel_ids()["layer1.0.conv1"].startswith("numba/conv2d/")


# -- graphs ------------------------------------------------------------------------------------


class Driver:
    """A stand-in for `cuda.bindings.driver`: records the calls, and refuses one by name."""

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
