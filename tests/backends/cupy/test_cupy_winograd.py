"""Winograd on the GPU without one: its transforms, layouts, rounds, and every index in NumPy.

The transforms are taken from the device code itself; the three phases are emulated in float32 with
the index maps of the kernels, on a workspace that begins as NaN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from r18.graph.ops import Conv2d, Problem
from r18.graph.passes import fuse
from r18.graph.precision import FP32
from r18.graph.resnet import resnet18
from r18_cupy.conv.sgemm import LANES_M, LANES_N, GemmTile
from r18_cupy.conv.winograd import (
    CHANNELS,
    FILTER_TRANSFORMS,
    GEMM_TILES,
    LANES,
    SPAN,
    WORKSPACE_NBYTES,
    Winograd,
    WinogradF2x2,
    WinogradF4x4,
    choose_tile,
    winograd_kernels,
)
from r18_cupy.cuda.compiler import KERNELS
from r18_oracle.cases import Case
from r18_oracle.judge.bounds import bound
from r18_oracle.judge.winograd import MATRICES
from support import compute

Array = np.ndarray[Any, np.dtype[Any]]
HEADER = (KERNELS / "conv/winograd.cuh").read_text()
KINDS = (WinogradF2x2, WinogradF4x4)
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.algorithm)
EACH_TILE = pytest.mark.parametrize("gemm", GEMM_TILES, ids=lambda gemm: gemm.name)


# -- the device code, read ---------------------------------------------------------------------


def transform(m: int, name: str) -> Callable[[Sequence[Array]], list[Array]]:
    """`Winograd<m>::name` of winograd.cuh as a function of NumPy values.

    Its body has only assignments, which are Python once the types are removed.
    """
    _, _, struct = HEADER.partition(f"struct Winograd<{m}>")
    found = re.search(
        rf"void {name}\(const float \(&(\w)\)\[\d\], float \(&(\w)\)\[(\d)\]\) {{", struct
    )
    assert found, f"Winograd<{m}>::{name}"
    given, made, length = found[1], found[2], int(found[3])
    body = struct[found.end() : struct.index("}", found.end())]
    body = re.sub(r"const float |(?<=\d)f\b", "", body)
    code = compile("\n".join(part.strip() for part in re.split("[;,]", body)), name, "exec")

    def apply(values: Sequence[Array]) -> list[Array]:
        scope: dict[str, Any] = {given: values, made: [None] * length}
        exec(code, scope)
        return cast(list[Array], scope[made])

    return apply


def test_the_device_transforms_are_the_matrices_of_the_bound() -> None:
    for m, of_host in FILTER_TRANSFORMS.items():
        bt, g, at = MATRICES[m]
        unit = list(np.eye(m + 2))
        np.testing.assert_array_equal(np.array(transform(m, "input")(unit)), bt)
        np.testing.assert_array_equal(np.array(transform(m, "output")(unit)), at)
        np.testing.assert_array_equal(of_host, g)


def test_the_span_is_the_structure_of_the_device() -> None:
    body = re.search(r"struct WinogradSpan {(.*?)};", HEADER, re.DOTALL)
    assert body
    code = re.sub(r"//.*", "", body[1])
    names = [name for line in re.findall(r"int ([^;]+);", code) for name in line.split(", ")]
    assert tuple(names) == SPAN.names


# -- the three phases, emulated ----------------------------------------------------------------


def both_sides(apply: Callable[[Sequence[Array]], list[Array]], values: Array) -> Array:
    """A transform of columns, then of rows: (E, E, ...) to (F, F, ...), in the kernels' order."""
    columns = [
        apply([values[r, s] for r in range(values.shape[0])]) for s in range(values.shape[1])
    ]
    rows = [apply([column[r] for column in columns]) for r in range(len(columns[0]))]
    return np.array(rows)


def spans_of(kernel: Winograd, problem: Problem) -> list[dict[str, int]]:
    """The span argument of each round's launches."""
    spans: list[dict[str, int]] = []
    for i, launch in enumerate(kernel.launches(problem)):
        fields = cast(Array, launch.arguments[-1]).view(SPAN)[0]
        span = {name: int(fields[name]) for name in SPAN.names or ()}
        if i % 3:
            assert span == spans[-1]
        else:
            spans.append(span)
    return spans


def origins(span: dict[str, int], m: int, k: Array) -> tuple[Array, Array, Array]:
    """Image, top and left of the output tiles of lanes k of the span."""
    tile = span["first"] + k
    columns, rows = span["columns"], span["rows"]
    return tile // columns // rows, tile // columns % rows * m, tile % columns * m


def transform_input(m: int, x: Array, padding: tuple[int, int], span: dict[str, int]) -> Array:
    """Phase 1, the transformed input: (positions, c_padded, width)."""
    (_, c, h, w), (ph, pw) = x.shape, padding
    out = np.full(((m + 2) ** 2, span["c_padded"], span["width"]), np.nan, np.float32)
    k = np.arange(span["width"])
    image, top, left = origins(span, m, np.where(k < span["count"], k, 0))
    y = top - ph + np.arange(m + 2)[:, None]
    z = left - pw + np.arange(m + 2)[:, None]
    inside = ((y >= 0) & (y < h))[:, None] & ((z >= 0) & (z < w))[None] & (k < span["count"])
    for channel in range(span["c_padded"]):
        if channel < c:
            pixels = x[image, channel, y[:, None] % h, z[None] % w]
        d = np.where(inside & (channel < c), pixels, np.float32(0))
        out[:, channel] = both_sides(transform(m, "input"), d).reshape(-1, span["width"])
    return out


def thread_map(gemm: GemmTile) -> tuple[Array, Array]:
    """Rows (threads, tm) and columns (threads, tn) of a block that its threads sum."""
    warp_m, warp_n = LANES_M * gemm.tm, LANES_N * gemm.tn
    warp, lane = np.divmod(np.arange(gemm.threads), 32)
    warp_row, warp_column = np.divmod(warp, gemm.n // warp_n)
    m = warp_row * warp_m + (lane // 16 * 2 + lane % 2) * 4
    n = warp_column * warp_n + lane // 2 % LANES_N * 4
    i, j = np.arange(gemm.tm), np.arange(gemm.tn)
    rows = m[:, None] + i // 4 * 4 * LANES_M + i % 4
    return rows, n[:, None] + j // 4 * 4 * LANES_N + j % 4


def multiply(gemm: GemmTile, filters: Array, transformed: Array, grid: tuple[int, ...]) -> Array:
    """Phase 2, the products: (positions, o_padded, width), each channel's products added in order.

    filters (positions, tiles of O, c_padded, m).
    """
    rows, columns = thread_map(gemm)
    positions, m_tiles, depth, _ = filters.shape
    assert grid[1:] == (positions, 1)
    product = np.full((positions, m_tiles * gemm.m, transformed.shape[2]), np.nan, np.float32)
    for block in range(grid[0]):
        n_tile, m_tile = divmod(block, m_tiles)
        n = n_tile * gemm.n + columns
        total = np.zeros((positions, *rows.shape, gemm.tn), np.float32)
        for c in range(depth):
            left, right = filters[:, m_tile, c, rows], transformed[:, c, n]
            total += left[..., None] * right[:, :, None]
        product[:, (m_tile * gemm.m + rows)[:, :, None], n[:, None]] = total
    return product


def transform_output(m: int, product: Array, span: dict[str, int], out: Array) -> None:
    """Phase 3, the transformed output without fused ops, into out (N, O, OH, OW)."""
    k = np.arange(span["count"])
    image, top, left = origins(span, m, k)
    values = product[:, : out.shape[1], : span["count"]].reshape(m + 2, m + 2, out.shape[1], -1)
    tiles = both_sides(transform(m, "output"), values)
    for i in range(m):
        for j in range(m):
            here = (top + i < out.shape[2]) & (left + j < out.shape[3])
            place = image[here], slice(None), (top + i)[here], (left + j)[here]
            assert np.isnan(out[place]).all(), "written twice"
            out[place] = tiles[i, j][:, here].T


def emulate(kernel: Winograd, problem: Problem, x: Array, weight: Array) -> Array:
    """What the kernel's launches compute, in float32."""
    m, gemm = kernel.output_tile, kernel.tiling(problem).gemm
    (filters,) = kernel.pack(problem, (weight,))
    out = np.full(problem.output, np.nan, np.float32)
    launches = kernel.launches(problem)
    for i, span in enumerate(spans_of(kernel, problem)):
        transformed = transform_input(m, x, cast(Conv2d, problem.op).padding, span)
        product = multiply(gemm, filters, transformed, launches[3 * i + 1].grid)
        transform_output(m, product, span, out)
    return out


def draw(problem: Problem, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(problem.inputs[0]).astype(np.float32)
    return x, rng.standard_normal(problem.op.weights()[0].shape).astype(np.float32)


def conv(shape: tuple[int, int, int, int], o: int, padding: tuple[int, int]) -> Problem:
    return Problem(Conv2d(shape[1], o, (3, 3), (1, 1), padding), (shape,))


PROBLEMS = (
    conv((1, 1, 1, 1), 1, (1, 1)),
    conv((1, 3, 7, 5), 5, (0, 0)),
    conv((2, 17, 9, 14), 65, (1, 1)),
    conv((2, 2, 1, 2), 3, (3, 2)),
    conv((3, 16, 8, 8), 64, (1, 1)),
)


@EACH_TILE
@EACH_KIND
@pytest.mark.parametrize("limit", [1, WORKSPACE_NBYTES])
def test_the_phases_are_the_convolution(kind: type[Winograd], gemm: GemmTile, limit: int) -> None:
    """The phases stay within the bound, and tilings and rounds do not change a bit."""
    for seed, problem in enumerate(PROBLEMS):
        x, weight = draw(problem, seed)
        kernel = kind(FP32, gemm=gemm, limit=limit)
        got = emulate(kernel, problem, x, weight)
        y = compute(problem.op, (x.astype(np.float64),), (weight.astype(np.float64),))
        case = Case.of(kernel, problem, (x,), (weight,))
        assert (np.abs(got - y) <= bound(case, kernel.contract, y).largest).all()
        np.testing.assert_array_equal(got, emulate(kind(FP32), problem, x, weight))


@EACH_KIND
def test_a_nan_stays_in_its_tiles(kind: type[Winograd]) -> None:
    problem, m = conv((2, 2, 11, 11), 3, (1, 1)), kind.output_tile
    x, weight = draw(problem, 7)
    kernel = kind(FP32)
    clean = emulate(kernel, problem, x, weight)
    x[1, 1, 4, 9] = np.nan
    got = emulate(kernel, problem, x, weight)
    # Output tiles that the pixel is in: those whose input tile, from one before it, holds it.
    touched = np.zeros(clean.shape, bool)
    for top in range(0, 11, m):
        for left in range(0, 11, m):
            if 0 <= 4 - (top - 1) < m + 2 and 0 <= 9 - (left - 1) < m + 2:
                touched[1, :, top : top + m, left : left + m] = True
    assert np.isnan(got[1, :, 3:6, 8:11]).all()
    np.testing.assert_array_equal(got[~touched], clean[~touched])


# -- tiles and layouts -------------------------------------------------------------------------


@EACH_TILE
def test_the_threads_of_a_block_cover_it_once(gemm: GemmTile) -> None:
    rows, columns = thread_map(gemm)
    hits = np.zeros((gemm.m, gemm.n), int)
    np.add.at(hits, (rows[:, :, None], columns[:, None]), 1)
    assert (hits == 1).all()
    vector = np.arange(gemm.k * gemm.n // 4).reshape(-1, gemm.threads)  # copied by each thread
    row, column = vector // (gemm.n // 4), vector % (gemm.n // 4) * 4
    np.testing.assert_array_equal(row * gemm.n + column, vector * 4)


@EACH_KIND
def test_rounds_cover_every_tile_once_within_the_limit(kind: type[Winograd]) -> None:
    problem = conv((70, 64, 56, 56), 64, (1, 1))
    limit = 40 * 2**20
    kernel = kind(FP32, limit=limit)
    spans, tiling = spans_of(kernel, problem), kernel.tiling(problem)
    assert len(spans) > 1
    assert kernel.workspace(problem) <= limit
    m = kind.output_tile
    ends = [span["first"] + span["count"] for span in spans]
    assert [span["first"] for span in spans] == [0, *ends[:-1]]
    assert ends[-1] == 70 * (56 // m) ** 2
    for span, gemm in zip(spans, kernel.launches(problem)[1::3], strict=True):
        assert span["count"] <= span["width"] <= tiling.width
        assert span["width"] % tiling.gemm.n == 0
        assert gemm.grid == (span["width"] // tiling.gemm.n, tiling.positions, 1)


def test_a_transform_has_a_thread_for_every_tile_and_strides_over_many_channels() -> None:
    problem = conv((1, 300_000, 3, 3), 1, (0, 0))
    first, _, last = WinogradF4x4(FP32).launches(problem)
    assert first.block == last.block == (LANES, CHANNELS, 1)
    assert first.grid == (1, 65535, 1)
    assert last.grid == (1, 1, 1)


def test_the_workspace_is_bounded_at_every_batch() -> None:
    for batch in (1, 64, 1024):
        for problem in fuse(resnet18(), "all").problems(batch).values():
            for kernel in winograd_kernels():
                if kernel.refusal(problem) is None:
                    assert kernel.workspace(problem) <= WORKSPACE_NBYTES


@EACH_KIND
def test_filters_are_transformed_in_float64_and_padded_with_zeros(kind: type[Winograd]) -> None:
    problem = conv((1, 5, 6, 6), 3, (1, 1))
    _, weight = draw(problem, 3)
    kernel = kind(FP32)
    (packed,) = kernel.pack(problem, (weight,))
    tiling, g = kernel.tiling(problem), MATRICES[kind.output_tile][1]
    gemm = tiling.gemm
    assert packed.shape == (tiling.positions, 1, tiling.c_padded, gemm.m)
    exact = np.einsum("ir,ocrs,js->ijco", g, weight.astype(np.float64), g)
    expected = exact.reshape(tiling.positions, 5, 3)
    error = np.abs(packed[:, 0, :5, :3] - expected)
    # A product of three may differ in float64's last bits, and so fall on the other side of a half.
    assert (error <= 2.0**-24 * np.abs(expected) * (1 + 2.0**-20) + 2.0**-50).all()
    assert not packed[:, :, 5:].any()
    assert not packed[..., 3:].any()


def test_large_products_take_large_tiles_and_small_ones_small() -> None:
    names = {
        (o, count): choose_tile(36, o, count).name
        for o, count in ((512, 4), (64, 196), (256, 128), (64, 12544), (128, 3136), (256, 4096))
    }
    assert names == {
        (512, 4): "m64n32k16",
        (64, 196): "m64n32k16",
        (256, 128): "m64n64k16",
        (64, 12544): "m64n128k8",
        (128, 3136): "m128n128k8",
        (256, 4096): "m128n128k8",
    }


@EACH_KIND
@pytest.mark.parametrize(("window", "stride"), [((3, 3), (2, 1)), ((1, 3), (1, 1))])
def test_other_windows_and_strides_are_refused(
    kind: type[Winograd], window: tuple[int, int], stride: tuple[int, int]
) -> None:
    problem = Problem(Conv2d(4, 4, window, stride, (1, 1)), ((1, 4, 8, 8),))
    assert kind(FP32).refusal(problem) == "Winograd takes 3×3 windows of stride 1"
