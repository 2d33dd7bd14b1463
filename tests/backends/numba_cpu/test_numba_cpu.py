"""Numba's CPU kernels at the edges of their vectors, panels, tiles, bands and rounds.

The oracle searches them like every kernel; here each edge is crossed on purpose. How work is
divided never shows in a result: every blocking gives the same bits, on every number of
threads.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.registry import cpu_target
from numpy.lib.stride_tricks import sliding_window_view
from thread_counts import HELPERS, assert_same_bits

from r18.backend import Array, CompileOptions, Kernel, Plan
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18.graph.precision import FP32
from r18.graph.resnet import resnet18, tiny
from r18.runtime.plan import make_plan
from r18.weights import load_weights
from r18_numba_cpu import Backend, compiled, conv, implicit_gemm, packing, winograd
from r18_oracle.check.call import observe
from r18_oracle.generate.crossings import crossings
from r18_oracle.generate.inputs import kinds_for, make_case
from r18_oracle.judge.verdict import judge
from r18_oracle.ops.normalize import normalization
from support import images, output_of, run_python

CHANNELS = (1, 3, 15, 16, 17, 31, 33)
"""One, few, and numbers around the ends of vectors (16) and panels (32)."""

KERNELS = {kernel.id.removeprefix("numba-cpu/"): kernel for kernel in Backend().kernels()}
GEMM = KERNELS["conv2d/implicit_gemm/fp32"]
WINOGRAD = KERNELS["conv2d/winograd_f4x4/fp32"]
FROM_PLANES = KERNELS["conv2d/implicit_gemm/fp32/from_nchw"]
CONVS = [GEMM, WINOGRAD, FROM_PLANES]
OTHERS = [k for k in KERNELS.values() if k.op is not Conv2d and k.precision is FP32]

each_conv = pytest.mark.parametrize("kernel", CONVS, ids=lambda kernel: kernel.id)


@pytest.fixture(scope="module")
def backend() -> Backend:
    found = Backend()
    found.probe()
    return found


def conv_problem(
    channels: int,
    outputs: int,
    image: tuple[int, int, int],
    window: tuple[int, int, int] = (3, 1, 1),
    *,
    fused: bool = True,
) -> Problem:
    """A convolution of (N, H, W) images by a window of (pixels, stride, padding)."""
    (n, h, w), (k, s, p) = image, window
    plain = Conv2d(channels, outputs, (k, k), (s, s), (p, p))
    shape = (n, channels, h, w)
    if not fused:
        return Problem(plain, (shape,))
    op = replace(plain, bias=True, residual=True, relu=True)
    return Problem(op, (shape, plain.infer(shape)))


def taken(kernel: Kernel, problem: Problem) -> Problem | None:
    """The problem if the kernel takes it, else the problem without its residual, else None."""
    if kernel.refusal(problem) is not None and problem.op.arity == 2:
        op = replace(problem.op, residual=False)  # type: ignore[type-var]
        problem = Problem(op, problem.inputs[:1])
    return problem if kernel.refusal(problem) is None else None


def result(
    backend: Backend, kernel: Kernel, problem: Problem, kind: str = "normal", seed: int = 0
) -> Array:
    """The output, checked against its bound (integers: to the bit) and for stray writes."""
    case = make_case(kernel, problem, kind, seed)
    seen = observe(backend, kernel, case)
    assert (seen.trespass, seen.changed, seen.untouched().any()) == (None, None, False)
    judged = judge(case, kernel.contract, seen.output, exact=kind == "exact")
    assert judged.ok, f"{kernel.id}: {problem}, {kind}: {judged}"
    return seen.output


# -- edges -------------------------------------------------------------------------------------


@each_conv
def test_every_end_of_a_vector_and_of_a_panel(backend: Backend, kernel: Kernel) -> None:
    rng = np.random.default_rng(0)
    for index, (channels, outputs) in enumerate(product(CHANNELS, CHANNELS)):
        n, h, w = (int(extent) for extent in rng.integers(1, (4, 10, 10)))
        problem = taken(kernel, conv_problem(channels, outputs, (n, h, w)))
        assert problem is not None
        kinds = ("exact", "normal", "edges") if kernel is not WINOGRAD else ("normal", "edges")
        result(backend, kernel, problem, kinds[index % len(kinds)], seed=index)


WINDOWS = ((3, 1, 1), (3, 2, 1), (3, 1, 0), (1, 2, 0), (3, 1, 2), (7, 2, 3))
"""Windows as (pixels, stride, padding)."""


@each_conv
def test_every_image_from_one_pixel_to_nine_by_nine(backend: Backend, kernel: Kernel) -> None:
    for h, w in product(range(1, 10), range(1, 10)):
        # Windows take turns, or it would take long; Winograd's are every second one.
        for k, s, p in WINDOWS[0 if kernel is WINOGRAD else (h + w) % 2 :: 2]:
            if min(h, w) + 2 * p >= k:
                problem = taken(kernel, conv_problem(5, 3, (2, h, w), (k, s, p)))
                assert problem is not None
                result(backend, kernel, problem)


@pytest.mark.parametrize("kernel", [GEMM, FROM_PLANES], ids=lambda kernel: kernel.id)
def test_windows_strides_and_padding_of_unlike_axes(backend: Backend, kernel: Kernel) -> None:
    for size, stride, padding in (
        ((1, 5), (2, 1), (0, 2)),
        ((5, 1), (1, 3), (3, 0)),
        ((2, 3), (3, 2), (2, 3)),  # padding as wide as the window
        ((3, 2), (5, 4), (0, 1)),  # pixels never read
        ((4, 7), (1, 1), (4, 7)),
    ):
        op = Conv2d(3, 17, size, stride, padding, bias=True)
        for h, w in ((1, 1), (4, 7), (7, 4), (6, 33)):
            if h + 2 * padding[0] >= size[0] and w + 2 * padding[1] >= size[1]:
                result(backend, kernel, Problem(op, ((2, 3, h, w),)), "exact")


def problems_of(op: type[Op]) -> list[Problem]:
    """Problems of an op other than convolution, around its vectors, spans and tiles."""
    images = [(n, c, h, w) for c in CHANNELS for n, h, w in ((1, 1, 1), (2, 3, 5))]
    rows = [(n, k) for n in (1, 2, 5, 6, 7, 13, 14, 15, 29) for k in (1, 16, 33)]
    spans = [(1, extent) for extent in (1, 15, 16, 17, 4095, 4096, 4097, 8193)]
    match op.__name__:
        case "BatchNorm":
            return [Problem(BatchNorm(shape[1]), (shape,)) for shape in images]
        case "ReLU":
            return [Problem(ReLU(), (shape,)) for shape in (*images, *spans)]
        case "Add":
            pairs = [(shape, shape) for shape in (*images, *spans)]
            return [Problem(Add(relu), pair) for pair in pairs for relu in (False, True)]
        case "MaxPool2d":
            pools = (MaxPool2d((3, 3), (2, 2), (1, 1)), MaxPool2d((1, 2), (3, 1), (0, 1)))
            return [Problem(pool, (shape,)) for pool in pools for shape in images]
        case "GlobalAvgPool":
            return [Problem(GlobalAvgPool(), (shape,)) for shape in images]
        case "Linear":
            return [Problem(Linear(k, o), ((n, k),)) for n, k in rows for o in (1, 31, 33)]
        case "Softmax":
            return [Problem(Softmax(), (shape,)) for shape in rows]
        case "Normalize":
            many = [(2, 3, 65, 64), (1, 5, 33, 128)]  # more than a span of pixels
            return [Problem(normalization(s[1]), (s,)) for s in (*images, *many)]
        case "ConvMaxPool":  # test_numba_cpu_conv_maxpool.py has more of it
            pool = MaxPool2d((3, 3), (2, 2), (1, 1))
            convs = [Conv2d(s[1], 33, (3, 3), padding=(1, 1), bias=True) for s in images]
            return [
                Problem(ConvMaxPool(conv, pool), (shape,))
                for conv, shape in zip(convs, images, strict=True)
            ]
        case "Relayout":
            ways = product((Layout.NCHW, Layout.NHWC), repeat=2)
            return [Problem(Relayout(*way), (shape,)) for way in ways for shape in images]
    raise AssertionError(op)


def others() -> list[tuple[Kernel, Problem]]:
    """The kernels and problems of all ops other than convolution."""
    return [(kernel, problem) for kernel in OTHERS for problem in problems_of(kernel.op)]


def test_every_end_of_what_is_no_convolution(backend: Backend) -> None:
    kinds = ("exact", "normal", "edges")
    for index, (kernel, problem) in enumerate(others()):
        known = kinds_for(kernel, problem)
        kind = kinds[index % 3]
        result(backend, kernel, problem, kind if kind in known else "normal", seed=index)


# -- cuts: they decide how fast, never what, is computed ---------------------------------------


def bits(backend: Backend, kernel: Kernel, problem: Problem) -> bytes:
    return result(backend, kernel, problem, "normal").tobytes()


@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1), (7, 2, 3), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("kernel", [GEMM, FROM_PLANES], ids=lambda kernel: kernel.id)
def test_bands_of_any_height_give_the_same_bits(
    backend: Backend, kernel: Kernel, window: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = taken(kernel, conv_problem(17, 70, (2, 21, 9), window))
    assert problem is not None
    whole = bits(backend, kernel, problem)
    rows = problem.output[2]
    assert implicit_gemm.bands(problem, 2).rows == rows
    seen = set()
    for nbytes in range(0, 40_000, 1_500):
        monkeypatch.setattr(implicit_gemm, "BAND_NBYTES", nbytes)
        cut = implicit_gemm.bands(problem, 2)
        if (cut.rows, cut.panels) not in seen:
            seen.add((cut.rows, cut.panels))
            assert bits(backend, kernel, problem) == whole
    heights = {height for height, _ in seen}
    assert 1 in heights
    assert any(rows % height for height in heights)  # the last band is lower


@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1), (1, 1, 0)], ids=str)
@pytest.mark.parametrize("kernel", [GEMM, FROM_PLANES], ids=lambda kernel: kernel.id)
def test_rows_that_share_a_tile_have_the_bits_of_each_alone(
    backend: Backend, kernel: Kernel, window: tuple[int, int, int]
) -> None:
    """Rows in a shared tile have their own bits: cutting off rows below changes none above."""
    rows = compiled.module("micro_kernel").ROWS
    for width in (1, rows // 2, rows // 2 + 1, rows):
        size, stride, pad = window
        columns = (width - 1) * stride + size - 2 * pad
        op = replace(conv_problem(5, 33, (1, 5, 5), window).op, residual=False)
        problem = Problem(op, ((1, 5, 5 * stride, columns),))
        assert problem.output[3] == width
        case = make_case(kernel, problem, "normal", 0)
        whole = observe(backend, kernel, case).output
        for height in range(1, problem.output[2]):
            cut = case.inputs[0][:, :, : (height - 1) * stride + size - pad]
            shorter = replace(problem, inputs=(cut.shape,))
            alone = observe(backend, kernel, replace(case, problem=shorter, inputs=(cut,))).output
            np.testing.assert_array_equal(alone[:, :, :height], whole[:, :, :height])


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_planes_are_interleaved_to_the_last_pixel(dtype: type) -> None:
    """Rows of every length up to three vectors and a pixel. Nothing outside of them is written."""
    vector = compiled.module("vector")
    interleave = vector.interleave

    @numba.njit
    def run(x, source, plane, count, out, to):  # type: ignore[no-untyped-def]
        interleave(x, source, plane, 3, count, out, to)

    rng = np.random.default_rng(0)
    for count in range(3 * vector.LANES + 2):
        plane, source, to = count + 5, 3, 7
        x = rng.integers(1, 1 << 16, source + 3 * plane).astype(dtype)
        out = np.zeros(to + 3 * count + 9, dtype)
        run(x, source, plane, count, out, to)
        expected = np.zeros_like(out)
        planes = x[source:].reshape(3, plane)[:, :count]
        expected[to : to + 3 * count] = planes.T.reshape(-1)
        np.testing.assert_array_equal(out, expected)


def test_filters_that_do_not_stay_in_cache_are_read_for_one_band() -> None:
    """Large filters are read once, in one band: layer 4 has 9 MB of filters and 166 KB of image."""
    cut = implicit_gemm.bands(conv_problem(512, 512, (1, 7, 7)), 2)
    assert cut.rows == 7
    assert implicit_gemm.bands(conv_problem(512, 8, (1, 7, 7)), 2).rows < 7


POOLS = [kernel for name, kernel in KERNELS.items() if name.startswith("maxpool2d/")]


@pytest.mark.parametrize("kernel", POOLS, ids=lambda kernel: kernel.id)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("channels", [6, 17, 32, 63, 64, 65])
def test_maxima_of_any_window_are_exact(
    backend: Backend, kernel: Kernel, size: int, channels: int
) -> None:
    """Max-pooling is exact for any window: NaN of either sign wins, −∞ loses to all, −0 stays."""
    op = MaxPool2d((size, size), stride=(2, 2), padding=(size // 2, size // 2))
    problem = Problem(op, ((2, channels, 9, 8),))
    case = make_case(kernel, problem, "normal", 0)
    x = case.inputs[0].astype(np.float32)
    x[0, 0, 0, 0], x[0, 1, 4, 4], x[0, 2, 2, 2] = -np.nan, np.nan, np.inf
    x[0, 3], x[1, 4], x[1, 5] = -np.inf, -np.abs(x[1, 4]), -np.nan
    x[0, 5], x[1, 3] = -0.0, 0.0
    x[1, 3, 1::2] = x[1, 3, :, 1:7:2] = -0.0  # each window still has a +0
    given = replace(case, inputs=(x.astype(case.inputs[0].dtype),))
    got = observe(backend, kernel, given).output.astype(np.float32)
    x = given.inputs[0].astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 0), *((size // 2,) * 2,) * 2), constant_values=-np.inf)
    windows = sliding_window_view(padded, (size, size), (2, 3))[:, :, ::2, ::2]
    np.testing.assert_array_equal(got, windows.max((4, 5))[:, :, : got.shape[2], : got.shape[3]])
    assert np.signbit(got[0, 5]).all()
    assert not np.signbit(got[1, 3]).any()


def test_channels_are_shared_out_where_bands_are_few(backend: Backend) -> None:
    """Channels are divided among threads if there are few bands, without changing a bit."""
    one = conv_problem(5, 70, (1, 3, 3))
    cuts = [implicit_gemm.bands(one, threads).panels for threads in (1, 2, 8)]
    assert cuts == sorted(cuts, reverse=True)
    assert cuts[-1] == 1
    many = conv_problem(5, 70, (64, 3, 3))
    assert implicit_gemm.bands(many, 2).panels == packing.panels(70)
    case = make_case(GEMM, many, "normal", 0)
    whole = observe(backend, GEMM, case).output
    for index in (0, 63):
        inputs = tuple(array[index : index + 1] for array in case.inputs)
        alone = observe(backend, GEMM, replace(case, problem=one, inputs=inputs)).output
        np.testing.assert_array_equal(alone, whole[index : index + 1])


def test_both_orders_of_winograd_and_every_round_give_the_same_bits(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = conv_problem(17, 33, (1, 3, 146))
    whole = bits(backend, WINOGRAD, problem)
    tiles = winograd.tiling(problem).tiles
    assert tiles == 37  # which no chunk divides
    seen = set()
    for filters, nbytes in product((winograd.FILTER_NBYTES, 0), (0, 150_000, 300_000, 1 << 20)):
        monkeypatch.setattr(winograd, "FILTER_NBYTES", filters)
        for name in ("CACHED_NBYTES", "ROUND_NBYTES"):
            monkeypatch.setattr(winograd, name, nbytes)
        cut = winograd.tiling(problem)
        assert cut.fused == (filters > 0)
        seen.add((cut.fused, cut.chunk))
        assert bits(backend, WINOGRAD, problem) == whole
    for fused in (True, False):
        chunks = {chunk for found, chunk in seen if found is fused}
        assert 1 in chunks
        assert len(chunks) > 2
    assert (False, tiles) in seen


def test_winograds_extra_problems_share_filters_in_one_round_and_in_several() -> None:
    """Winograd's extra problems share filters in one round and in several; drawn ones cannot."""
    one, several = (winograd.tiling(road) for road in WINOGRAD.extra_problems)
    assert not one.fused
    assert not several.fused
    assert one.chunk == one.tiles > one.rows > one.columns
    assert 1 < several.chunk < several.tiles
    for road in WINOGRAD.extra_problems:
        height, width = road.inputs[0][2:]
        assert height != width  # or one could be taken for the other
    channels, outputs = (
        WINOGRAD.extra_problems[0].inputs[0][1],
        WINOGRAD.extra_problems[0].output[1],
    )
    assert channels % 16 == 1
    assert outputs % 32 == 0
    assert set(WINOGRAD.extra_problems) <= set(crossings(WINOGRAD, 1, 1))


def test_winograd_is_planned_where_it_can_pay() -> None:
    """Winograd is planned for enough channels, and if for some images, also for more."""
    for problem in resnet18().problems(1).values():
        if not isinstance(problem.op, Conv2d):
            assert conv.fastest(problem) is None
            continue
        more = [conv.fastest(_batched(problem, n)) for n in (1, 2, 8, 64)]
        if problem.op.kernel_size != (3, 3) or problem.op.stride != (1, 1):
            assert set(more) == {GEMM.id}
        else:
            assert more == sorted(more)  # "implicit_gemm" comes before "winograd"
            assert more[-1] == WINOGRAD.id
    assert conv.fastest(conv_problem(15, 64, (8, 56, 56))) == GEMM.id


def _batched(problem: Problem, samples: int) -> Problem:
    return Problem(problem.op, tuple((samples, *shape[1:]) for shape in problem.inputs))


# -- threads -----------------------------------------------------------------------------------


PROGRAM = """
import hashlib, json, numba
import numba
import numpy as np
from r18.backend import CompileOptions
from r18.graph.resnet import tiny
from r18.weights import load_weights
from r18_numba_cpu import Backend
from support import images

backend, network = Backend(), tiny()
backend.probe()
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_worker_keeps_its_part_of_a_plans_buffers(backend: Backend, precision: str) -> None:
    """Buffers share all their bytes or none, unless the plan is larger than caches."""
    spans = spans_of(make_plan(backend, resnet18(), CompileOptions(precision=precision)))
    assert sum(count > 1 for count in spans.values()) > 5
    ordered = sorted(spans)
    assert all(start + size <= next_ for (start, size), (next_, _) in pairwise(ordered))
    large = make_plan(backend, resnet18(), CompileOptions(batch=64, precision=precision))
    assert large.arena_nbytes > backend.memory.by_size_nbytes
    ordered = sorted(spans_of(large))
    assert any(start + size > next_ for (start, size), (next_, _) in pairwise(ordered))


def spans_of(plan: Plan) -> Counter[tuple[int, int]]:
    """How many values and workspaces of a plan have the same offset and bytes."""
    found = [(t.offset, t.nbytes) for t in plan.tensors.values()]
    found += [(s.workspace_offset, s.workspace_nbytes) for s in plan.steps if s.workspace_nbytes]
    return Counter(found)


def test_every_number_of_threads_gives_the_same_bits() -> None:
    assert_same_bits(
        """
from test_numba_cpu import CONVS, GEMM, conv_problem, others, taken

asked = [(kernel, taken(kernel, conv_problem(17, 70, (2, 13, 9)))) for kernel in CONVS]
asked.append((GEMM, conv_problem(17, 200, (1, 5, 5))))
asked += others()[::7]
"""
    )


def test_two_threads_may_run_two_programs_at_once(backend: Backend) -> None:
    network, rounds = tiny(), 5
    x = images(network, 4)
    options = CompileOptions(batch=4)
    programs = [
        backend.compile(network, load_weights(f"synthetic:{seed}", network), options)
        for seed in (0, 1)
    ]
    expected = [program(x) for program in programs]
    assert not np.array_equal(expected[0], expected[1])
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(program, x) for _ in range(rounds) for program in programs]
        for index, run in enumerate(runs):
            np.testing.assert_array_equal(run.result(), expected[index % 2])


def test_threads_that_numbas_own_pool_could_not_bear_take_turns() -> None:
    """Threads take turns under Numba's `workqueue`, which two callers at once would crash."""
    code = f"""{PROGRAM}
import threading
weights = load_weights("synthetic", network)
program = backend.compile(network, weights, CompileOptions(batch=2))
other = backend.compile(network, weights, CompileOptions(batch=2))
x = images(network, 2)
expected, wrong, begin = program(x), [], threading.Barrier(2)

def work(mine):
    begin.wait()
    for _ in range(20):
        if not np.array_equal(mine(x), expected):
            wrong.append(1)

threads = [threading.Thread(target=work, args=(one,)) for one in (program, other)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(numba.threading_layer(), len(wrong))
"""
    env = {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    assert output_of(code, path=HELPERS, env=env).split() == ["workqueue", "0"]


# -- compiled code -----------------------------------------------------------------------------


RECTIFY = """
import json, numpy as np
from r18.runtime.launch import run_kernel
from r18.graph.ops import Problem, ReLU
from r18_numba_cpu import Backend, compiled
backend = Backend()
(kernel,) = (k for k in backend.kernels() if k.op is ReLU and k.precision.name == "fp32")
out = run_kernel(backend, kernel, Problem(ReLU(), ((1, 17),)), np.arange(17)[None] - 8.0)
stats = compiled.module("others").rectify.stats
counts = [sum(found.values()) for found in (stats.cache_hits, stats.cache_misses)]
print(json.dumps([out.sum().item(), *counts]))
"""
"""A program that prints a sum, and how many kernels came from the cache and were compiled."""


def rectified(cache: Path) -> tuple[list[float], str]:
    """The output of `RECTIFY` in a process of its own, and its stderr."""
    done = run_python(RECTIFY, env={"R18_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    def run() -> tuple[tuple[list[float], str], dict[Path, int]]:
        said = rectified(tmp_path)
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return said, {path: path.stat().st_mtime_ns for path in files}

    said, written = run()
    assert said == ([36.0, 0, 1], "")
    (folder,) = (tmp_path / "numba-cpu").iterdir()
    assert [(path.suffix, path.parent) for path in written] == [(".numba", folder)]
    assert run() == (([36.0, 1, 0], ""), written)


def test_damaged_code_is_compiled_again(tmp_path: Path) -> None:
    """Cached code that is empty, or has one bit changed, is compiled again."""
    assert rectified(tmp_path) == ([36.0, 0, 1], "")
    (path,) = tmp_path.rglob("*.numba")
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for damaged in (b"", flipped):
        path.write_bytes(damaged)
        said, warned = rectified(tmp_path)
        assert said == [36.0, 0, 1]
        assert f"RuntimeWarning: the compiled code in '{path}' is damaged" in warned
    assert rectified(tmp_path) == ([36.0, 1, 0], "")


def test_without_a_cache_nothing_is_written_next_to_the_sources(tmp_path: Path) -> None:
    """Without a cache folder, no file is written next to the sources, as Numba would do."""
    package = Path(compiled.__file__).parent

    def files() -> set[Path]:
        return {path for path in package.rglob("*") if path.suffix != ".pyc"}

    before = files()
    (tmp_path / "file").write_text("no folder")
    assert rectified(tmp_path / "file" / "cache") == ([36.0, 0, 1], "")
    assert files() == before


def test_changed_sources_are_compiled_into_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    """A change in any source gives another folder; Numba would check only a function's own file."""
    jit = compiled.module("jit")
    copy = tmp_path / "kernels"
    shutil.copytree(Path(jit.__file__).parent, copy)
    monkeypatch.setattr(jit, "__file__", str(copy / "jit.py"))
    assert jit._folder() == jit.FOLDER
    seen = {jit.FOLDER}
    for name in ("vector.py", "integers/bytes.py"):
        with (copy / name).open("a") as stream:
            stream.write("# changed\n")
        assert jit._folder() not in seen
        seen.add(jit._folder())
    assert {folder.parent for folder in seen} == {jit.FOLDER.parent}


def test_each_signature_is_cached_in_a_file_of_its_own(tmp_path: Path, backend: Backend) -> None:
    def same(x: float) -> float:
        return x

    kept = compiled.module("cache").KernelCache(same, tmp_path)
    codegen = cpu_target.target_context.codegen()
    signatures = (numba.float32(numba.float32), numba.float64(numba.float64))
    assert len({kept._path(signature, codegen) for signature in signatures}) == 2


class Processor:
    """Numba's description of the processor that it compiles for."""

    def __init__(self, *about: str) -> None:
        self.about = about

    def magic_tuple(self) -> tuple[str, ...]:
        return self.about


def test_all_that_decides_the_code_is_part_of_a_file_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    """A cache file's name has all that decides its code; machines and versions may share it."""
    cache = compiled.module("cache")
    signature = numba.float32(numba.float32)

    def path(function: str = "x", processor: str = "zen") -> Path:
        names: dict[str, Any] = {}
        exec(f"def same(x):\n    return {function}", names)
        kept = cache.KernelCache(names["same"], tmp_path)
        found: Path = kept._path(signature, Processor("linux", processor))
        return found

    found = [path(), path("x + x"), path(processor="icelake")]
    for module, name in ((cache.numba, "numba"), (cache.llvmlite, "llvmlite")):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", f"another {name}")
            found.append(path())
    with monkeypatch.context() as patch:
        patch.setattr(cache.sys, "version", "another Python")
        found.append(path())
    assert len(set(found)) == len(found)
    assert path() == found[0]


def test_flushing_a_cache_deletes_every_file_of_its_kernel(
    tmp_path: Path, backend: Backend
) -> None:
    def same(x: float) -> float:
        return x

    others = [tmp_path / "other-1.numba", tmp_path / "same.txt"]
    for path in (tmp_path / "same-1.numba", tmp_path / "same-2.numba", *others):
        path.write_bytes(b"")
    compiled.module("cache").KernelCache(same, tmp_path).flush()
    assert sorted(tmp_path.iterdir()) == others


def test_importing_it_and_listing_its_kernels_imports_no_numba() -> None:
    code = """
import sys
from r18_numba_cpu import Backend
print(len(Backend().kernels()), "numba" in sys.modules)
"""
    assert output_of(code).split() == [str(len(KERNELS)), "False"]


def test_without_numba_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["numba"] = None
from r18.errors import BackendUnavailable
from r18.backend.registry import get_backend
try:
    get_backend("numba-cpu")
except BackendUnavailable as error:
    print(error.name, error.cause, error.remedy, sep="|")
"""
    assert output_of(code) == (
        "numba-cpu|Numba does not import: import of numba halted; None in sys.modules|"
        "pip install 'r18[numba]'"
    )


# -- threads and the cache ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "layers"),
    [
        ({}, "omp tbb workqueue"),
        ({"NUMBA_THREADING_LAYER_PRIORITY": "workqueue omp tbb"}, "workqueue omp tbb"),
    ],
)
def test_openmp_is_preferred_to_tbb(variables: dict[str, str], layers: str) -> None:
    """OpenMP is preferred, as TBB warns at a fork; the user's own setting wins."""
    code = """
import numba
from r18_numba_cpu.compiled import vector
vector()
print(*numba.config.THREADING_LAYER_PRIORITY)
"""
    assert output_of(code, env=variables) == layers


def test_cached_code_is_loaded_without_the_compiler(tmp_path: Path) -> None:
    """Cached code loads without the slow compiler, and code compiled later still works."""
    code = """
import sys
import numpy as np
from r18.graph.ops import Problem, Softmax
from r18.runtime.launch import run_kernel
from r18_numba_cpu import Backend
backend = Backend()
(kernel,) = (k for k in backend.kernels() if k.op is Softmax and k.precision.name == "fp32")
x = np.arange(34.0, dtype=np.float32).reshape(2, 17)
out = run_kernel(backend, kernel, Problem(Softmax(), (x.shape,)), x)
print("numba.misc.cffiimpl" in sys.modules, float(out.max()))
import numba
@numba.njit
def sorted_sum(a):
    return {1: np.sort(a)[-2:].sum()}[1]
print(sorted_sum(np.arange(5.0)))
"""
    env = {"R18_CACHE": str(tmp_path)}
    first, second = (output_of(code, env=env).split() for _ in range(2))
    assert (first[0], second[0]) == ("True", "False")
    assert first[1:] == second[1:]
