"""bfloat16 on the CPU at the edges of pairs, vectors, panels, tiles and bands, on every path.

The same tests run each way to compute a sum: by AMX (its instructions emulated where the CPU has
none), by `vdpbf16ps` (skipped by name where the CPU has none), and by float32's micro-kernel.
"""

from __future__ import annotations

from itertools import product

import emulated_tiles
import ml_dtypes
import numpy as np
import pytest
from test_numba_cpu import CHANNELS, WINDOWS, conv_problem, problems_of, result, taken
from thread_counts import assert_same_bits

from r18.backend import CompileOptions, Kernel
from r18.backend.registry import load_backend
from r18.bench.contenders import program_contender
from r18.errors import NoKernel, UnknownName
from r18.graph.ops import (
    Conv2d,
    Linear,
    Problem,
    ReLU,
)
from r18.graph.resnet import resnet18, tiny
from r18.runtime.launch import run_kernel
from r18.weights import load_weights
from r18_numba_cpu import Backend, bfloat16, blocking, compiled, integers, without
from r18_numba_cpu.bfloat16 import products
from r18_numba_cpu.integers import tiles as integers_tiles
from r18_numba_cpu.integers.packing import AMX, PORTABLE
from r18_numba_cpu.kernels.arguments import MOST_PAIRS
from r18_oracle.generate.inputs import kinds_for
from r18_oracle.network.outputs import output_loss
from r18_oracle.ops.normalize import normalization

KERNELS = [kernel for kernel in Backend().kernels() if kernel.precision.name == "bf16"]
CONVS = [k for k in KERNELS if k.op is Conv2d and k.algorithm.startswith("implicit_gemm")]
(WINOGRAD,) = (k for k in KERNELS if k.algorithm == "winograd_f4x4")
LINEARS = [k for k in KERNELS if k.op is Linear]
OTHERS = [k for k in KERNELS if k.op not in (Conv2d, Linear)]
WITH_PAIRS = [k for k in KERNELS if k.algorithm.endswith("_avx512_bf16")]
WITH_AMX = [k for k in KERNELS if k.algorithm.endswith("_amx")]

each_conv = pytest.mark.parametrize("kernel", CONVS, ids=lambda kernel: kernel.id)
pairs, amx = compiled.module("bfloat16.pairs"), compiled.module("amx")


pytestmark = pytest.mark.usefixtures("only_where_it_runs")


@pytest.fixture(scope="module")
def backend(backend_with_tiles: Backend) -> Backend:
    return backend_with_tiles


# -- edges -------------------------------------------------------------------------------------


@each_conv
def test_every_end_of_a_vector_and_of_a_panel(backend: Backend, kernel: Kernel) -> None:
    rng = np.random.default_rng(0)
    for index, (channels, outputs) in enumerate(product(CHANNELS, CHANNELS)):
        n, h, w = (int(extent) for extent in rng.integers(1, (4, 10, 18)))
        problem = taken(kernel, conv_problem(channels, outputs, (n, h, w), fused=index % 4 > 0))
        assert problem is not None
        result(backend, kernel, problem, ("exact", "normal", "edges")[index % 3], seed=index)


@each_conv
def test_every_image_from_one_pixel_to_seven_by_nine(backend: Backend, kernel: Kernel) -> None:
    for h, w in product(range(1, 8), range(1, 10)):
        for k, s, p in WINDOWS[(h + w) % 2 :: 2]:
            if min(h, w) + 2 * p >= k:
                problem = taken(kernel, conv_problem(5, 3, (2, h, w), (k, s, p)))
                assert problem is not None
                result(backend, kernel, problem)


@each_conv
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


@each_conv
@pytest.mark.parametrize(("channels", "window"), [(1, 1), (1, 3), (3, 3), (3, 7), (16, 1), (37, 3)])
def test_an_infinity_stays_in_the_windows_that_see_it(
    backend: Backend, kernel: Kernel, channels: int, window: int
) -> None:
    """An infinity stays in its windows: no pair or tile multiplies it by a weight of 0."""
    op = Conv2d(channels, 33, (window, window), padding=(window // 2, window // 2))
    rng = np.random.default_rng(0)
    weight = rng.choice([-1.0, 1.0, 2.0], (33, channels, window, window)).astype(np.float32)
    for row, column, channel in product((0, 3, 4), (0, 4, 9, 10), {0, channels - 1}):
        x = np.ones((1, channels, 5, 11), np.float32)
        plain = run_kernel(backend, kernel, Problem(op, (x.shape,)), x, weight)
        x[0, channel, row, column] = np.inf
        seen = run_kernel(backend, kernel, Problem(op, (x.shape,)), x, weight)
        near = np.zeros((5, 11), bool)
        reach = window // 2
        near[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1] = 1
        assert np.isinf(seen[..., near]).all()
        np.testing.assert_array_equal(seen[..., ~near], plain[..., ~near])


def others() -> list[tuple[Kernel, Problem]]:
    """Kernels and problems other than convolutions, around their vectors, spans and tiles."""
    return [
        (kernel, problem) for kernel in (*LINEARS, *OTHERS) for problem in problems_of(kernel.op)
    ]


def test_every_end_of_what_is_no_convolution(backend: Backend) -> None:
    kinds = ("exact", "normal", "edges")
    run = [(kernel, problem) for kernel, problem in others() if kernel in backend.kernels()]
    assert {kernel.op for kernel, _ in run} == {kernel.op for kernel in KERNELS} - {Conv2d}
    for index, (kernel, problem) in enumerate(run):
        known = kinds_for(kernel, problem)
        kind = kinds[index % 3]
        result(backend, kernel, problem, kind if kind in known else "normal", seed=index)


def test_winograd_at_the_ends_of_its_tiles(backend: Backend) -> None:
    for index, (h, w) in enumerate(product((1, 3, 4, 5, 8, 9), repeat=2)):
        problem = conv_problem(CHANNELS[index % 7], CHANNELS[index % 5], (2, h, w))
        result(backend, WINOGRAD, problem, ("normal", "edges")[index % 2], seed=index)


# -- cuts: they decide how fast, never what, is computed ---------------------------------------


@each_conv
@pytest.mark.parametrize("window", [(3, 1, 1), (7, 2, 3), (1, 2, 0)], ids=str)
def test_bands_of_any_height_give_the_same_bits(
    backend: Backend, kernel: Kernel, window: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = taken(kernel, conv_problem(17, 70, (3, 21, 9), window))
    assert problem is not None
    whole = result(backend, kernel, problem).tobytes()
    group = AMX if kernel in WITH_AMX else products.PAIRS if kernel in WITH_PAIRS else PORTABLE
    read, written = ((n, h, w, c) for n, c, h, w in (problem.inputs[0], problem.output))
    assert isinstance(problem.op, Conv2d)
    shape = products.band_shape(problem.op, read, written, group)
    seen = set()
    monkeypatch.setattr(blocking, "RESIDENT_NBYTES", 0)
    for nbytes in range(0, 48_000 if group == PORTABLE else 24_000, 1_000):
        monkeypatch.setattr(blocking, "BAND_NBYTES", nbytes)
        monkeypatch.setattr(blocking, "BANDS_NBYTES", 2 * nbytes)
        cut = products.blocks(shape, 2, group)
        if (cut.samples, cut.rows, cut.panels) not in seen:
            seen.add((cut.samples, cut.rows, cut.panels))
            products.numbers.cache_clear()
            assert result(backend, kernel, problem).tobytes() == whole
    products.numbers.cache_clear()
    assert {1, 2} <= {samples for samples, *_ in seen}  # of three
    heights = {height for _, height, _ in seen}
    assert {1, shape.out_h} <= heights
    assert any(shape.out_h % height for height in heights)  # the last band is lower


def test_large_weights_have_their_channels_in_slices() -> None:
    assert products.slices(Conv2d(512, 512, (3, 3))) == 16
    assert products.slices(Conv2d(512, 512, (1, 9))) == 16
    for op in (
        Conv2d(528, 512, (3, 3)),  # 16.5 slices
        Conv2d(4096, 1024, (1, 1)),
        Conv2d(512, 512, (5, 5)),  # 50 KiB of a panel in a slice
        Conv2d(256, 512, (3, 3)),
        Linear(4096, 1024),
    ):
        assert products.slices(op) == 1, op


def turns_of(problem: Problem) -> int:
    """How many turns the pairs of tiles of a band take."""
    read, written = ((n, h, w, c) for n, c, h, w in (problem.inputs[0], problem.output))
    assert isinstance(problem.op, Conv2d)
    shape = products.band_shape(problem.op, read, written, AMX)
    rows = products.blocks(shape, compiled.most_threads(), AMX).rows
    cover = products.cover(shape, rows)
    tiles = len(integers_tiles.places(shape, rows, cover)) // cover.height
    return -(-tiles // (2 * MOST_PAIRS))


def test_the_oracle_is_given_slices_in_two_turns() -> None:
    problem = products.several_slices()
    assert isinstance(problem.op, Conv2d)
    assert products.slices(problem.op) == 4
    assert turns_of(problem) == 2
    for kernel in WITH_AMX:
        is_sliced = kernel.op is Conv2d and kernel.reads is None
        assert (problem in kernel.extra_problems) == is_sliced


@pytest.mark.parametrize("window", [(3, 1, 1), (5, 2, 2), (2, 2, 1)], ids=str)
def test_slices_in_any_bands_give_the_sum(
    backend: Backend, window: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one pair of tiles and of several, whose sums wait in one turn or in several."""
    kernel = next(k for k in WITH_AMX if k.op is Conv2d and k.reads is None)
    monkeypatch.setattr(products, "SLICED_NBYTES", 0)
    monkeypatch.setattr(products, "MOST_TAPS", 25)
    monkeypatch.setattr(blocking, "RESIDENT_NBYTES", 0)
    monkeypatch.setattr(blocking, "COPIED", 0)  # or the number of threads decides on rows, too
    turns = set()
    for channels, pixels in product((64, 96), ((2, 3, 5), (2, 17, 23))):
        problem = conv_problem(channels, 40, pixels, window)
        assert isinstance(problem.op, Conv2d)
        assert products.slices(problem.op) == channels // products.SLICE
        for nbytes in (0, 8_000, 200_000):
            monkeypatch.setattr(blocking, "BAND_NBYTES", nbytes)
            monkeypatch.setattr(blocking, "BANDS_NBYTES", 2 * nbytes)
            products.numbers.cache_clear()
            result(backend, kernel, problem, "exact")
            turns.add(turns_of(problem))
    products.numbers.cache_clear()
    assert min(turns) == 1 < max(turns)


def test_steps_of_tiles_end_where_a_kernel_row_does() -> None:
    for channels, kernel in product((*range(1, 40), 64, 512), (1, 2, 3, 5, 7)):
        op = Conv2d(channels, 8, (kernel, kernel))
        out = 21 - kernel
        shape = products.band_shape(op, (1, 20, 20, channels), (1, out, out, 8), AMX)
        step = products.cover(shape, 1).step
        assert shape.channels - channels in (0, 1)
        assert 4 <= step <= 64
        assert step % 4 == 0
        assert kernel * shape.channels * 2 % step == 0
    assert products.cover(shape._replace(channels=64, kernel_w=3), 1).step == 64


def test_every_number_of_threads_gives_the_same_bits() -> None:
    assert_same_bits(
        """
from test_numba_cpu import conv_problem, taken
from test_numba_cpu_bfloat16 import CONVS, WINOGRAD, others

asked = [(k, taken(k, conv_problem(17, 70, (2, 13, 9)))) for k in (*CONVS, WINOGRAD)]
asked += [(k, taken(k, conv_problem(17, 200, (1, 5, 5)))) for k in CONVS]
asked += others()[::11]
"""
    )


@pytest.mark.skipif(compiled.module("amx").AVAILABLE, reason="this CPU has AMX")
def test_code_of_tiles_is_kept_for_other_processes(backend: Backend) -> None:
    """Code with tiles is cached for other processes; Numba caches none that holds an address."""
    problem = taken(WITH_AMX[0], conv_problem(4, 4, (1, 3, 3)))
    assert problem is not None
    result(backend, WITH_AMX[0], problem)
    assert emulated_tiles.kept(compiled.module("bfloat16.implicit_gemm").implicit_gemm)


# -- the CPU -----------------------------------------------------------------------------------


def test_a_cpu_without_the_instructions_has_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU without the instructions their kernels are refused by name, never replaced."""
    everything = Backend().kernels()  # until the CPU is known
    assert {*WITH_PAIRS, *WITH_AMX} <= set(everything)
    monkeypatch.setattr(pairs, "AVAILABLE", False)
    monkeypatch.setattr(amx, "HAS_BFLOAT16", False)
    monkeypatch.setattr(amx, "AVAILABLE", True)  # int8 alone
    backend = Backend()
    info = backend.probe()
    assert "no AVX512-BF16" in info.name
    assert (info.details["avx512_bf16"], info.details["amx_bf16"]) == ("no", "no")
    assert not {*WITH_PAIRS, *WITH_AMX} & set(backend.kernels())
    assert backend.kernels() == without(
        everything, bfloat16.BY_PAIRS, bfloat16.BY_AMX, *_integers_that_are_missing()
    )
    network = tiny()
    options = CompileOptions(precision="bf16", kernels={"conv2d": WITH_PAIRS[0].id})
    with pytest.raises((UnknownName, NoKernel), match="avx512_bf16"):
        backend.compile(network, load_weights("synthetic", network), options)


def _integers_that_are_missing() -> tuple[str, ...]:
    dots = compiled.module("integers.dots")
    has = {integers.BY_VNNI: dots.HAS_VNNI, integers.BY_WORDS: dots.HAS_WORDS}
    return tuple(ending for ending, is_there in has.items() if not is_there)


def test_winograd_is_planned_where_it_can_pay() -> None:
    """Winograd is never planned with AMX; with `vdpbf16ps` only if it fits a core's cache."""
    everything = tuple(KERNELS)
    with_pairs = without(everything, bfloat16.BY_AMX)
    portable = without(with_pairs, bfloat16.BY_PAIRS)
    chosen = {
        name: [
            bfloat16.fastest(problem, listed) == WINOGRAD.id
            for listed in (everything, with_pairs, portable)
        ]
        for name, problem in resnet18().problems(1).items()
        if isinstance(problem.op, Conv2d)
    }
    assert chosen["conv1"] == [False, False, False]
    assert chosen["layer1.0.conv1"] == chosen["layer2.1.conv2"] == [False, True, True]
    assert chosen["layer2.0.conv1"] == [False, False, False]
    assert chosen["layer3.1.conv1"] == [False, False, True]
    assert chosen["layer4.1.conv1"] == [False, False, False]
    assert bfloat16.fastest(Problem(ReLU(), ((1, 8),)), everything) is None


# -- a network ---------------------------------------------------------------------------------


BY = {
    "what the CPU has": {},
    "portable": {"conv2d": "*/implicit_gemm/bf16*", "linear": "*/tiled/bf16"},
    "amx": {"conv2d": "*/implicit_gemm_amx/bf16*", "linear": "*/tiled_amx/bf16"},
}


@pytest.mark.parametrize("kernels", BY.values(), ids=BY)
@pytest.mark.parametrize("fusion", ["none", "all"])
def test_a_network_loses_no_more_than_a_backend_may(
    backend: Backend, kernels: dict[str, str], fusion: str
) -> None:
    network = tiny()
    weights = load_weights("synthetic", network)
    options = CompileOptions(batch=2, precision="bf16", fusion=fusion, kernels=kernels)
    about = program_contender("numba-cpu", backend.probe(), backend, network, weights, options)
    runner = about.make()
    found = output_loss(about, runner, network, weights)
    assert found.ok, found.reason()
    assert found.relative > 1e-4  # or it would be float32's
    runner.close()


def test_pixels_become_bfloat16_in_the_first_kernel(backend: Backend) -> None:
    kernel = next(k for k in KERNELS if k.op.__name__ == "Normalize")
    x = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    op = normalization(3)
    seen = run_kernel(backend, kernel, Problem(op, ((1, 3, 16, 16),)), x.transpose(0, 3, 1, 2))
    wide = load_backend("numpy")
    plain = next(k for k in wide.kernels() if k.op is type(op) and k.precision.name == "fp32")
    exact = run_kernel(wide, plain, Problem(op, ((1, 3, 16, 16),)), x.transpose(0, 3, 1, 2))
    error = np.abs(seen.astype(np.float64) - exact)
    assert (error <= 2.0**-8 * np.abs(exact) + 2.0**-20).all()
    assert seen.dtype == ml_dtypes.bfloat16
