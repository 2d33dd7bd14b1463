"""Winograd's F(2×2, 3×3) of bytes: exact at tile edges, in every blocking, for any bytes.

It needs products of int16; a CPU that has none skips these tests by name.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from test_numba_cpu_integers import conv_problem, result
from thread_counts import assert_same_bits

from r18.graph.ops import Conv2d, Problem
from r18.graph.quantized import QuantizedConv2d
from r18_numba_cpu import Backend, compiled
from r18_numba_cpu.integers import fastest, winograd
from r18_numba_cpu.integers.packing import FLIP, WORDS
from r18_oracle.cases import Case
from r18_oracle.check.call import observe
from r18_oracle.generate.inputs import kinds_for, make_case

(KERNEL,) = (k for k in Backend().kernels() if k.algorithm == "winograd_f2x2_avx2")
HAS_WORDS = compiled.module("integers.dots").HAS_WORDS

only_with_words = pytest.mark.skipif(not HAS_WORDS, reason="this CPU has no AVX2")


@pytest.fixture(scope="module")
def backend() -> Backend:
    found = Backend()
    found.probe()
    return found


def numbered() -> list[Problem]:
    """Problems with 1 to 5 rows and columns, paddings of 0 to 2, channels around vector ends."""
    sizes = [(h, w) for h, w in product(range(1, 6), repeat=2)]
    found = []
    for index, ((h, w), padding) in enumerate(product(sizes, (0, 1, 2))):
        if min(h, w) + 2 * padding < 3:
            continue
        channels, outputs = (1, 3, 15, 16, 17, 33)[index % 6], (1, 15, 16, 17, 32, 49)[index % 5]
        window = 3, 1, padding
        found.append(
            conv_problem(channels, outputs, (1 + index % 2, h, w), window, signs=index % 8)
        )
    return found


@only_with_words
@pytest.mark.parametrize("problem", numbered(), ids=str)
def test_every_edge_of_an_image(backend: Backend, problem: Problem) -> None:
    for seed, kind in enumerate(kinds_for(KERNEL, problem)):
        result(backend, KERNEL, problem, kind, seed=seed)


@only_with_words
@pytest.mark.parametrize("signs", range(8))
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_sign_and_width_of_weights(backend: Backend, signs: int, bits: int) -> None:
    result(backend, KERNEL, conv_problem(33, 49, (2, 9, 12), signs=signs, bits=bits))


@only_with_words
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("stored", ["uint8", "int8"])
def test_the_largest_sums_of_the_most_channels(backend: Backend, stored: str, sign: int) -> None:
    """The largest sums of the most channels are exact: four times the sum just fits int32."""
    conv = Conv2d(winograd.DEPTH, 3, (3, 3), (1, 1), (1, 1), bias=True)
    problem = Problem(QuantizedConv2d(conv, (stored,)), ((1, winograd.DEPTH, 4, 4),))
    drawn = make_case(KERNEL, problem, "normal", 0)
    limits = np.iinfo(stored)
    image = np.full(problem.inputs[0], limits.max if stored == "uint8" else limits.min, stored)
    weight = np.full_like(drawn.weights[0], sign * 127)
    multiplier = np.full_like(drawn.weights[2], 1e-6)
    weights = weight, drawn.weights[1], multiplier
    case = Case.of(KERNEL, problem, (image,), weights)
    assert 4 * 255 * 128 * 9 * winograd.DEPTH < 2**31 <= 4 * 255 * 128 * 9 * (winograd.DEPTH + 1)
    sums = image[0, 0, 0, 0].astype(np.int64) * sign * 127 * 9 * winograd.DEPTH
    expected = np.rint(np.float32(sums + drawn.weights[1]) * np.float32(1e-6))
    seen = observe(backend, KERNEL, case).output
    np.testing.assert_array_equal(seen[0, :, 1, 1], np.clip(expected, -128, 127))


@only_with_words
def test_cuts_of_any_size_give_the_same_bits(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = conv_problem(17, 70, (3, 11, 9), signs=5)
    whole = result(backend, KERNEL, problem)
    seen = set()
    for nbytes, blocks in product(range(0, 250_000, 10_000), (1, 4)):
        monkeypatch.setattr(winograd, "PATCHES_NBYTES", nbytes)
        monkeypatch.setattr(winograd, "BLOCKS", blocks)
        winograd.numbers.cache_clear()
        *_, rows, panels, _, _, _, _ = winograd.numbers(problem.op, (3, 11, 9, 17), (3, 11, 9, 70))
        if (rows, panels) not in seen:
            seen.add((int(rows), int(panels)))
            np.testing.assert_array_equal(result(backend, KERNEL, problem), whole)
    winograd.numbers.cache_clear()
    heights = {rows for rows, _ in seen}
    assert {1, 18} <= heights  # one row of tiles, and those of three images
    assert any(18 % height for height in heights)  # the last block is lower
    assert len({panels for _, panels in seen}) > 1


@only_with_words
def test_every_number_of_threads_gives_the_same_bits() -> None:
    assert_same_bits(
        """
from test_integer_winograd import KERNEL, conv_problem

problems = conv_problem(17, 70, (2, 13, 9), signs=3), conv_problem(17, 200, (1, 5, 5))
asked = [(KERNEL, problem) for problem in problems]
"""
    )


def test_packed_filters_are_transformed_ones() -> None:
    problem = conv_problem(5, 3, (1, 4, 4), fused=False, signs=1)
    case = make_case(KERNEL, problem, "normal", 0)
    packed, bias, multiplier, residual_multiplier = winograd.pack_filters(problem.op, case.weights)
    weight = case.weights[0].astype(np.int64)
    columns = compiled.module("micro_kernel").COLUMNS
    assert packed.shape == (1, 16, 3, columns, 2)
    assert packed.dtype == np.int16
    for o, c, i, j in product(range(3), range(5), range(4), range(4)):
        matrix = winograd.TWICE_G @ weight[o, c] @ winograd.TWICE_G.T
        assert packed[0, 4 * i + j, c // 2, o, c % 2] == matrix[i, j]
    assert not packed[:, :, -1, :, 1].any()  # beyond the channels
    assert not packed[:, :, :, 3:].any()  # and beyond the outputs
    flipped = case.weights[1].astype(np.int64) - FLIP * weight.sum(axis=(1, 2, 3))
    np.testing.assert_array_equal(bias[:3], flipped)
    np.testing.assert_array_equal(multiplier[:3], case.weights[2])
    np.testing.assert_array_equal(residual_multiplier, [1])


def test_what_it_refuses() -> None:
    def of(channels: int, window: tuple[int, int, int]) -> Problem:
        return conv_problem(channels, 4, (1, 5, 5), window, fused=False)

    assert winograd.refuses(of(winograd.DEPTH, (3, 1, 1))) is None
    assert winograd.refuses(of(4, (3, 2, 1))) == "Winograd takes 3×3 windows of stride 1"
    assert winograd.refuses(of(4, (1, 1, 0))) == "Winograd takes 3×3 windows of stride 1"
    said = winograd.refuses(of(winograd.DEPTH + 1, (3, 1, 1)))
    assert said == "four times a sum of more than 1,827 channels may leave int32"


def test_a_plan_takes_it_for_long_products_alone() -> None:
    with_words = tuple(
        k for k in Backend().kernels() if not k.id.endswith(("_amx/int8", "_vnni/int8"))
    )
    asked = conv_problem(64, 64, (1, 8, 8), fused=False)
    assert fastest(asked, with_words) == KERNEL.id
    assert fastest(conv_problem(15, 64, (1, 8, 8), fused=False), with_words) is None
    assert fastest(conv_problem(64, 15, (1, 8, 8), fused=False), with_words) is None
    assert fastest(conv_problem(64, 64, (1, 8, 8), (3, 2, 1), fused=False), with_words) is None
    assert fastest(asked, Backend().kernels()) is None  # AMX and VNNI come first
    portable = tuple(k for k in with_words if not k.id.endswith("_avx2/int8"))
    assert fastest(asked, portable) is None
    assert fastest(asked, ()) is None
    assert WORDS == 2
