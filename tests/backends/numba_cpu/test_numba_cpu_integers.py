"""Quantised ops on the CPU: equal to the bit at every tile edge, in every blocking, on every path.

The same tests run each way to compute a sum: by AMX (its instructions emulated where the CPU has
none), by VNNI and AVX2 (skipped by name where the CPU lacks them), and portable, in float32.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import emulated_tiles
import numba
import numpy as np
import pytest
from thread_counts import assert_same_bits

from integer_networks import assert_equals_numpy, images_of, integer_weights
from r18.backend import Array, CompileOptions, Kernel
from r18.errors import UnknownName
from r18.graph.ops import Conv2d, Layout, Linear, MaxPool2d, Op, Problem
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantize import quantized
from r18.graph.quantized import (
    LIMITS,
    MOST_DEPTH,
    RELAID,
    STORAGES,
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedGlobalAvgPool,
    QuantizedLinear,
    QuantizedMaxPool2d,
    QuantizedRelayout,
    QuantizePixels,
)
from r18.graph.resnet import resnet18, tiny
from r18.runtime.launch import run_kernel
from r18.runtime.plan import make_plan
from r18_numba_cpu import Backend, blocking, compiled, without
from r18_numba_cpu.compiled import ceil_div
from r18_numba_cpu.integers import BY_AMX, BY_VNNI, BY_WORDS, gemm
from r18_numba_cpu.integers.packing import AMX, BANDS, PORTABLE, VNNI, WORDS
from r18_numba_cpu.kernels.arguments import Depth
from r18_numba_cpu.packing import panels
from r18_oracle import plugin
from r18_oracle.check.call import observe
from r18_oracle.generate.inputs import kinds_for, make_case
from r18_oracle.judge.verdict import judge
from r18_oracle.ops.normalize import normalization

CHANNELS = (1, 3, 4, 15, 17, 31, 33, 64)
"""Channel counts around the ends of groups (4), vectors (16) and panels (32)."""

KERNELS = {k.id.removeprefix("numba-cpu/"): k for k in Backend().kernels() if k.precision is INT8}
ALL_CONVS = [kernel for kernel in KERNELS.values() if kernel.op is QuantizedConv2d]
CONVS = [kernel for kernel in ALL_CONVS if "winograd" not in kernel.algorithm]
"""The convolutions that take every problem; see test_integer_winograd.py for the others."""
LINEARS = [kernel for kernel in KERNELS.values() if kernel.op is QuantizedLinear]
WITH_VNNI = [kernel for kernel in KERNELS.values() if "vnni" in kernel.algorithm]
WITH_WORDS = [kernel for kernel in KERNELS.values() if "avx2" in kernel.algorithm]
WITH_AMX = [kernel for kernel in KERNELS.values() if "amx" in kernel.algorithm]

each_conv = pytest.mark.parametrize("kernel", CONVS, ids=lambda kernel: kernel.id)


pytestmark = pytest.mark.usefixtures("only_where_it_runs")


@pytest.fixture(scope="module")
def backend(backend_with_tiles: Backend) -> Backend:
    return backend_with_tiles


def conv_problem(
    channels: int,
    outputs: int,
    image: tuple[int, int, int],
    window: tuple[int, int, int] = (3, 1, 1),
    *,
    fused: bool = True,
    signs: int = 0,
    bits: int = 8,
) -> Problem:
    """A convolution of (N, H, W) images by a window of (pixels, stride, padding).

    signs: which of image (1) and residual (2) are signed; and whether there is no ReLU (4).
    """
    (n, h, w), (k, s, p) = image, window
    plain = Conv2d(channels, outputs, (k, k), (s, s), (p, p), bias=True)
    stored = STORAGES[signs & 1], STORAGES[signs >> 1 & 1]
    shape = (n, channels, h, w)
    conv = replace(plain, residual=fused, relu=not signs & 4)
    op = QuantizedConv2d(conv, stored[: conv.arity], bits)
    return Problem(op, (shape, plain.infer(shape))[: conv.arity])


def result(
    backend: Backend, kernel: Kernel, problem: Problem, kind: str = "normal", seed: int = 0
) -> Array:
    """The output, after checking that it equals the reference and nothing else is written.

    A byte that was never written may be right by chance; the oracle's own checks look for those.
    """
    case = make_case(kernel, problem, kind, seed, variant=seed)
    seen = observe(backend, kernel, case)
    assert seen.trespass is None
    assert seen.changed is None
    judged = judge(case, kernel.contract, seen.output)
    assert judged.ok, f"{kernel.id}: {problem}, {kind}: {judged}"
    return seen.output


# -- edges -------------------------------------------------------------------------------------


@each_conv
def test_every_end_of_a_group_a_vector_and_a_panel(backend: Backend, kernel: Kernel) -> None:
    rng = np.random.default_rng(0)
    for index, (channels, outputs) in enumerate(product(CHANNELS, CHANNELS)):
        n, h, w = (int(extent) for extent in rng.integers(1, (4, 10, 18)))
        problem = conv_problem(
            channels, outputs, (n, h, w), fused=index % 3 > 0, signs=index % 8, bits=2 << index % 3
        )
        kinds = kinds_for(kernel, problem)
        result(backend, kernel, problem, kinds[index % len(kinds)], seed=index)


WINDOWS = ((3, 1, 1), (3, 2, 1), (3, 1, 0), (1, 2, 0), (3, 1, 2), (7, 2, 3))
"""Windows as (pixels, stride, padding)."""


@each_conv
def test_every_image_from_one_pixel_to_seven_by_nine(backend: Backend, kernel: Kernel) -> None:
    for h, w in product(range(1, 8), range(1, 10)):
        for index, (k, s, p) in enumerate(WINDOWS[(h + w) % 2 :: 2]):
            if min(h, w) + 2 * p >= k:
                problem = conv_problem(5, 3, (2, h, w), (k, s, p), signs=(h + w + index) % 8)
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
        conv = Conv2d(3, 17, size, stride, padding, bias=True)
        for (h, w), stored in zip(((1, 1), (4, 7), (7, 4), (6, 33)), STORAGES * 2, strict=True):
            if h + 2 * padding[0] >= size[0] and w + 2 * padding[1] >= size[1]:
                problem = Problem(QuantizedConv2d(conv, (stored,)), ((2, 3, h, w),))
                result(backend, kernel, problem, "edges", seed=h)


@each_conv
@pytest.mark.parametrize("signs", range(8))
def test_roundings_that_others_get_wrong(backend: Backend, kernel: Kernel, signs: int) -> None:
    """All edges (ties, both ends, what only a fused multiply-add changes, …) are right in whole
    panels, whose sums are requantised in registers, and in part of one."""
    for outputs in (64, 40):
        problem = conv_problem(4, outputs, (1, 5, 15), signs=signs)
        for variant in range(16):
            result(backend, kernel, problem, "edges", seed=variant)


LONGEST = 2**24 // (255 * 127)
"""The most products that float32 adds exactly."""


@each_conv
@pytest.mark.parametrize(
    ("channels", "window"),
    [
        *((LONGEST + more, 1) for more in (-1, 0, 1)),  # of one kernel row
        (2 * LONGEST + 1, 1),
        *((173 + more, 3) for more in (-1, 0, 1)),  # a row has 519 products at 173 channels
        (86, 3),  # two rows have 516
        (58, 5),  # one of two rows: 290
        (MOST_DEPTH, 1),
    ],
)
@pytest.mark.parametrize("stored", STORAGES)
def test_the_longest_sums(
    backend: Backend, kernel: Kernel, channels: int, window: int, stored: str
) -> None:
    """The longest sums of the largest products are exact; any rounding on the way would show.

    Sums of signed bytes exceed int32 on the way, since 128 is added to each byte.
    """
    conv = Conv2d(channels, 2, (window, window), bias=True)
    op = QuantizedConv2d(conv, (stored,))
    problem = Problem(op, ((1, channels, window, window),))
    case = make_case(kernel, problem, "normal", 0)
    largest = 255 if stored == "uint8" else 127
    x = np.full(problem.inputs[0], largest, case.inputs[0].dtype)
    weight = np.full(case.weights[0].shape, 127, case.weights[0].dtype)
    weight[1] = -127
    exact = largest * 127 * conv.depth
    for index, near in enumerate((3, 1, 0, -1, -100)):  # what is left of the sum
        bias = np.array([near - exact, exact - near])
        weights = (weight, bias.astype(case.weights[1].dtype), np.ones_like(case.weights[2]))
        seen = observe(backend, kernel, replace(case, inputs=(x,), weights=weights))
        assert seen.output.reshape(-1).tolist() == [near, -near], index


def others() -> list[tuple[Kernel, Problem]]:
    """Kernels and problems other than convolutions, around their vectors, spans and tiles."""

    def asked(op: type[Op]) -> list[Problem]:
        images = [(n, c, h, w) for c in CHANNELS for n, h, w in ((1, 1, 1), (2, 3, 5))]
        images += [(3, 3, 1, extent) for extent in (1023, 1024, 1025, 2049)]
        rows = [(n, k) for n in (1, 2, 5, 6, 7, 13, 14, 15, 29) for k in (1, 4, 16, 33)]
        spans = [(1, extent) for extent in (1, 15, 16, 17, 1023, 1024, 1025, 2049)]
        match op.__name__:
            case "QuantizedMaxPool2d":
                pools = (MaxPool2d((3, 3), (2, 2), (1, 1)), MaxPool2d((1, 2), (3, 1), (0, 1)))
                return [
                    Problem(QuantizedMaxPool2d(pool, stored), (shape,))
                    for pool, stored in product(pools, STORAGES)
                    for shape in images
                    if shape[3] > 1 or pool.padding[1]
                ]
            case "QuantizedGlobalAvgPool":
                ops = map(QuantizedGlobalAvgPool, STORAGES)
                return [Problem(op, (shape,)) for op in ops for shape in images]
            case "QuantizedLinear":
                return [
                    Problem(QuantizedLinear(Linear(k, o), stored, bits), ((n, k),))
                    for n, k in rows
                    for o, stored, bits in zip(
                        (1, 31, 32, 40), STORAGES * 2, (*LIMITS, 8), strict=True
                    )
                ]
            case "QuantizedConvMaxPool":  # test_numba_cpu_integer_stem.py has more of it
                pool = MaxPool2d((3, 3), (2, 2), (1, 1))
                convs = [conv_problem(c, 33, (n, h, w), fused=False) for n, c, h, w in images]
                return [
                    Problem(QuantizedConvMaxPool(conv.op, pool), conv.inputs)
                    for conv in convs
                    if isinstance(conv.op, QuantizedConv2d)
                ]
            case "Quantize":
                return [Problem(Quantize(), (shape,)) for shape in (*images, *spans)]
            case "QuantizePixels":
                return [
                    Problem(QuantizePixels(normalization(shape[1])), (shape,)) for shape in images
                ]
            case "QuantizedRelayout":
                return [
                    Problem(QuantizedRelayout(source, target, stored), (shape,))
                    for source, target in product(Layout, Layout)
                    for stored in RELAID
                    for shape in ((1, 1, 1, 1), (2, 3, 5, 4), (3, 33, 1, 2), (1, 16, 7, 17))
                ]
        raise AssertionError(op)

    kernels = [kernel for kernel in KERNELS.values() if kernel not in ALL_CONVS]
    return [(kernel, problem) for kernel in kernels for problem in asked(kernel.op)]


def test_every_end_of_what_is_no_convolution(backend: Backend) -> None:
    run = [(kernel, problem) for kernel, problem in others() if kernel in backend.kernels()]
    assert {kernel for kernel, _ in run} == {
        k for k in backend.kernels() if k.precision is INT8
    } - {*ALL_CONVS}
    for index, (kernel, problem) in enumerate(run):
        kinds = kinds_for(kernel, problem)
        result(backend, kernel, problem, kinds[index % len(kinds)], seed=index)


@pytest.mark.parametrize("stored", STORAGES)
@pytest.mark.parametrize("channels", [1, 31, 32, 33, 63, 64, 65, 129])
def test_maxima_of_any_window_and_vector(backend: Backend, stored: str, channels: int) -> None:
    kernel = KERNELS["qmaxpool2d/direct/int8"]
    for height, width in product(range(1, 6), repeat=2):
        op = MaxPool2d((height, width), (2, 2), (height // 2, width // 2))
        result(backend, kernel, Problem(QuantizedMaxPool2d(op, stored), ((2, channels, 7, 8),)))


def scales() -> list[np.float32]:
    """Random scales of all magnitudes; the ends of the range in which 1/scale is finite and not
    subnormal, and their neighbours.
    """
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.uniform(-149, 128, 100)), rng.uniform(0.005, 0.05, 100), 2.0**-6, 3, 1e-45
    ends = np.float32([2.0**-128, 2.0**-126, 1, 2.0**126, 2.0**127, np.finfo(np.float32).max])
    neighbours = [np.nextafter(ends[:-1], np.float32(to)) for to in (0, np.inf)]
    magnitudes = np.hstack(sizes).astype(np.float32)
    return list(np.concatenate([magnitudes, ends, *neighbours]))


def test_the_integer_of_a_quotient_is_that_of_a_division(backend: Backend) -> None:
    """Ties, and up to two floats from them; any bits; NaN, which becomes −128, and infinities."""
    kernel = KERNELS["quantize/divide/int8/from_nchw"]
    rng = np.random.default_rng(0)
    ties = np.arange(-300, 300) + 0.5
    ends = np.array([0.0, -0.0, 1e-45, 3.4e38, np.inf, np.nan], np.float32)
    for scale in scales():
        with np.errstate(over="ignore"):
            x = (ties * float(scale)).astype(np.float32)
        bits = rng.integers(0, 2**32, 1000, np.uint32).view(np.float32)
        near = [(x.view(np.int32) + step).view(np.float32) for step in (-2, -1, 0, 1, 2)]
        x = np.concatenate([*near, bits, ends, -ends])
        with np.errstate(all="ignore"):
            integers = np.rint(x / scale).clip(-128, 127)
        expected = np.where(np.isnan(integers), -128, integers).astype(np.int8)
        problem = Problem(Quantize(), ((1, 1, 1, x.size),))
        weights = np.array([scale])
        got = run_kernel(backend, kernel, problem, x.reshape(problem.inputs[0]), weights)
        np.testing.assert_array_equal(got.reshape(-1), expected, f"scale {scale}")


# -- cuts: they decide how fast, never what, is computed ---------------------------------------


@each_conv
@pytest.mark.parametrize("window", [(3, 1, 1), (7, 2, 3), (1, 2, 0)], ids=str)
def test_bands_of_any_height_give_the_same_bits(
    backend: Backend, kernel: Kernel, window: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = conv_problem(17, 70, (3, 21, 9), window, signs=5)
    whole = result(backend, kernel, problem)
    groups = ((AMX, WITH_AMX), (VNNI, WITH_VNNI), (WORDS, WITH_WORDS))
    group = next((group for group, kernels in groups if kernel in kernels), PORTABLE)
    read, written = ((n, h, w, c) for n, c, h, w in (problem.inputs[0], problem.output))
    assert isinstance(problem.op, QuantizedConv2d)
    shape = gemm.conv_shape(problem.op, read, written)
    seen = set()
    monkeypatch.setattr(blocking, "RESIDENT_NBYTES", 0)
    for nbytes in range(0, 12_000 * BANDS[group]().itemsize, 500):
        monkeypatch.setattr(blocking, "BAND_NBYTES", nbytes)
        monkeypatch.setattr(blocking, "BANDS_NBYTES", 2 * nbytes)
        cut = gemm.blocks(shape, 2, group)
        if (cut.samples, cut.rows, cut.panels) not in seen:
            seen.add((cut.samples, cut.rows, cut.panels))
            gemm.numbers.cache_clear()
            np.testing.assert_array_equal(result(backend, kernel, problem), whole)
    gemm.numbers.cache_clear()
    assert {1, 2} <= {samples for samples, *_ in seen}  # of three
    heights = {height for _, height, _ in seen}
    assert {1, shape.out_h} <= heights
    assert any(shape.out_h % height for height in heights)  # the last band is lower


@pytest.mark.parametrize(
    ("channels", "extent", "samples", "threads", "rows"),
    [(128, 28, 1, 1, 28), (128, 28, 1, 2, 14), (128, 28, 1, 3, 10), (128, 28, 1, 99, 1),
     (128, 28, 2, 2, 28), (128, 28, 2, 4, 14), (256, 14, 1, 2, 14), (512, 7, 1, 4, 7)],
)  # fmt: skip
def test_threads_share_the_rows_of_an_image_with_few_weights(
    channels: int, extent: int, samples: int, threads: int, rows: int
) -> None:
    """Layer 2 of a ResNet-18 is cut by rows; layers 3 and 4, with more weights, by channels."""
    problem = conv_problem(channels, channels, (samples, extent, extent))
    assert isinstance(problem.op, QuantizedConv2d)
    read, written = ((n, h, w, c) for n, c, h, w in (problem.inputs[0], problem.output))
    cut = gemm.blocks(gemm.conv_shape(problem.op, read, written), threads, VNNI)
    assert cut.rows == rows
    parts = samples * ceil_div(extent, rows)
    most = parts * panels(channels)
    assert parts * ceil_div(panels(channels), cut.panels) >= min(2 * threads, most)
    assert cut.slot & (cut.slot - 1) == 0  # a power of two: slots of most kernels are equal


def test_every_number_of_threads_gives_the_same_bits() -> None:
    assert_same_bits(
        """
from test_numba_cpu_integers import CONVS, conv_problem, others

asked = [(kernel, conv_problem(17, 70, (2, 13, 9), signs=3)) for kernel in CONVS]
asked += [(kernel, conv_problem(17, 200, (1, 5, 5))) for kernel in CONVS]
asked += others()[::11]
"""
    )


@pytest.mark.skipif(compiled.module("amx").AVAILABLE, reason="this CPU has AMX")
def test_code_of_tiles_is_kept_for_other_processes(backend: Backend) -> None:
    """Code with tiles is cached for other processes; Numba caches none that holds an address."""
    result(backend, WITH_AMX[0], conv_problem(4, 4, (1, 3, 3)))
    assert emulated_tiles.kept(compiled.module("integers.implicit_gemm").implicit_gemm)


# -- the CPU -----------------------------------------------------------------------------------


ENDINGS = {"HAS_VNNI": BY_VNNI, "HAS_WORDS": BY_WORDS}


def lacking(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Make this a CPU without AMX and without the instructions of these flags of `dots`."""
    monkeypatch.setattr(compiled.module("amx"), "AVAILABLE", False)
    for flag in ENDINGS:
        monkeypatch.setattr(compiled.module("integers.dots"), flag, flag not in flags)


@pytest.mark.parametrize("lacks", [("HAS_VNNI",), ("HAS_VNNI", "HAS_WORDS")], ids="+".join)
def test_a_cpu_has_the_kernels_that_it_runs(
    lacks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has only the kernels that it can run; others are refused by name, never replaced."""
    assert [kernel.id for kernel in (*WITH_VNNI, *WITH_WORDS)] == [
        "numba-cpu/qconv2d/implicit_gemm_vnni/int8",
        "numba-cpu/qconv2d_maxpool2d/implicit_gemm_vnni/int8/from_nchw",
        "numba-cpu/qlinear/tiled_vnni/int8",
        "numba-cpu/qconv2d/implicit_gemm_avx2/int8",
        "numba-cpu/qconv2d_maxpool2d/implicit_gemm_avx2/int8/from_nchw",
        "numba-cpu/qlinear/tiled_avx2/int8",
        "numba-cpu/qconv2d/winograd_f2x2_avx2/int8",
    ]
    lacking(monkeypatch, *lacks)
    backend_without = Backend()
    assert {*WITH_VNNI, *WITH_WORDS, *WITH_AMX} <= set(backend_without.kernels())  # not known yet
    info = backend_without.probe()
    assert "no VNNI" in info.name
    assert info.details["vnni"] == "no"
    of_this_cpu = without(Backend().kernels(), BY_AMX, *(ENDINGS[flag] for flag in lacks))
    assert [k for k in backend_without.kernels() if k.precision is INT8] == [
        k for k in of_this_cpu if k.precision is INT8
    ]
    schedule = fuse(tiny(), "all")
    weights = integer_weights(tiny(), images_of(tiny(), 1), 8)
    options = CompileOptions(precision="int8", kernels={"qconv2d": WITH_VNNI[0].id})
    with pytest.raises(UnknownName, match="did you mean 'numba-cpu/qconv2d/implicit_gemm"):
        Backend().compile(quantized(schedule), weights, options)


@pytest.mark.parametrize(
    ("lacks", "preferred"),
    [
        ((), {"implicit_gemm_vnni"}),
        (("HAS_VNNI",), {"implicit_gemm_avx2", "winograd_f2x2_avx2"}),
        (("HAS_VNNI", "HAS_WORDS"), {"implicit_gemm"}),
    ],
)
def test_a_plan_prefers_the_widest_products(
    lacks: tuple[str, ...], preferred: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch, *lacks)
    backend = Backend()
    backend.probe()
    options = CompileOptions(precision="int8")
    plan = make_plan(backend, quantized(fuse(resnet18(), "all")), options)
    chosen = {step.kernel.algorithm for step in plan.steps if step.kernel.op is QuantizedConv2d}
    assert chosen == preferred


def test_the_conformance_suite_lists_what_the_cpu_runs(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """The conformance suite probes a backend before it lists kernels, as its workers do."""
    lacking(monkeypatch, "HAS_VNNI", "HAS_WORDS")
    pytestconfig.stash[plugin.CHOSEN] = ["numba-cpu"]
    try:
        listed = plugin._parameters("r18_kernel", pytestconfig)
    finally:
        del pytestconfig.stash[plugin.CHOSEN]
    assert "numba-cpu/qconv2d/implicit_gemm/int8" in listed
    assert not [name for name in listed if name.endswith((BY_VNNI, BY_WORDS, BY_AMX))]


@pytest.mark.parametrize(
    ("flag", "unsigned", "signed", "instruction"),
    [
        ("HAS_VNNI", np.uint8, np.int8, "vpdpbusd"),
        ("HAS_WORDS", np.uint16, np.int16, "vpmaddwd"),
    ],
    ids=["vnni", "avx2"],
)
def test_a_register_tile_is_products_alone(
    flag: str, unsigned: type[np.integer], signed: type[np.integer], instruction: str
) -> None:
    """The loop over K of a whole tile has a product for each register and spills nothing."""
    dots, micro_kernel = (compiled.module(n) for n in ("integers.dots", "micro_kernel"))
    if not getattr(dots, flag):
        pytest.skip(f"this CPU has no {flag.removeprefix('HAS_')}")
    if dots.HAS_VNNI and instruction == "vpmaddwd":
        instruction = "vpdpwssd"
    tiles, arguments = compiled.module("integers.register_tile"), compiled.module("arguments")
    rows, columns, group = micro_kernel.ROWS, micro_kernel.COLUMNS, 4 // unsigned().itemsize

    @numba.njit
    def one(a, b, c, depth, terms):  # type: ignore[no-untyped-def]
        tile = arguments.Tile(0, 0, 0)
        tiles.multiply(rows, a, 0, group, b, 0, depth, c, 0, False, tile, terms)

    how = arguments.Requantization(np.uint8(0), False, False, np.float32(0), np.float32(0))
    floats, bytes_ = np.zeros(columns, np.float32), np.zeros(4 * rows, np.uint8)
    terms = arguments.Terms(np.zeros(columns, np.int32), floats, bytes_, floats, bytes_, how)
    a = np.arange(group * rows).astype(unsigned) + unsigned(255 - group * rows)
    b = (np.arange(group * columns) % 255 - 127).astype(signed)
    c = np.zeros(rows * columns, np.int32)
    one(a, b, c, Depth(1, 1, group), terms)
    wide = a.reshape(rows, group).astype(np.int32) @ b.reshape(columns, group).T.astype(np.int32)
    np.testing.assert_array_equal(c.reshape(rows, columns), wide)

    (assembly,) = one.inspect_asm().values()
    products = rows * micro_kernel.VECTORS
    blocks = re.split(r"^\.LBB\w+:", assembly, flags=re.MULTILINE)
    loops = [block for block in blocks if block.count(instruction) == products]
    assert loops
    for loop in loops:
        body = loop[: loop.rindex(instruction)]
        assert "rsp" not in body
        # Two columns of B; where a sum takes two instructions, a register or two change places.
        assert len(re.findall("vmov", body)) <= micro_kernel.VECTORS * (1 + (group == 2))


# -- a network ---------------------------------------------------------------------------------


ON_ANY_CPU = {"qconv2d": "*/implicit_gemm/int8", "qlinear": "*/tiled/int8"}
BY_AVX2 = {"qconv2d": "*/implicit_gemm_avx2/int8", "qlinear": "*/tiled_avx2/int8"}
BY_TILES = {"qconv2d": "*/implicit_gemm_amx/int8", "qlinear": "*/tiled_amx/int8"}


EACH_WAY = {"": {}, "portable": ON_ANY_CPU, "avx2": BY_AVX2, "amx": BY_TILES}


@pytest.mark.parametrize("kernels", EACH_WAY.values(), ids=EACH_WAY)
@pytest.mark.parametrize("pixels", [False, True], ids=["images", "pixels"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_network_in_integers_equals_numpys_at_every_value(
    backend: Backend, bits: int, pixels: bool, kernels: dict[str, str]
) -> None:
    if kernels is BY_AVX2 and not compiled.module("integers.dots").HAS_WORDS:
        pytest.skip("this CPU has no AVX2")
    assert_equals_numpy(backend, tiny(), bits, batch=3, pixels=pixels, kernels=kernels)
