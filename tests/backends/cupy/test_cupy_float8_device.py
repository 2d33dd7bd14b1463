"""Hopper's sums of e4m3 products, measured: how many bits they keep, and that they are cut off; and
that pooling and classifier in one launch give the bits of two."""

from __future__ import annotations

import numpy as np
import pytest

from faults.scaled import UNIT
from faults.summations import Products
from r18.backend import Array
from r18.errors import BackendUnavailable
from r18.graph.ops import Layout, Problem, parts_of
from r18.graph.precision import round_to_e4m3
from r18.runtime.launch import run_kernel
from r18_cupy import Backend
from r18_cupy.float8.gap_linear import ScaledGapLinear, scaled
from r18_cupy.float8.implicit_gemm_wgmma import ScaledImplicitGemmWgmma
from r18_cupy.float8.kernel import FRACTION
from r18_cupy.float8.others import ScaledGap, ScaledWarpDot
from r18_cupy.float8.unit import DEPTH, ROWS, STEP, sums
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge.roundings import summation_error


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> None:
    try:
        backend = Backend()
        backend.probe()
    except BackendUnavailable as error:
        pytest.skip(f"needs a GPU: {error.cause}")
    if ScaledImplicitGemmWgmma not in {type(kernel) for kernel in backend.kernels()}:
        pytest.skip("needs a GPU of compute capability 9.0")


def one_sum(terms: dict[int, tuple[float, float]], steps: int = DEPTH // STEP) -> float:
    """The unit's sum of products (x, w), which are given by their place in K."""
    a, b = np.zeros((ROWS, DEPTH)), np.zeros((ROWS, DEPTH))
    for place, (x, w) in terms.items():
        a[0, place], b[0, place] = x, w
    found = sums(a, b, steps)
    assert not found[1:].any()
    return float(found[0, 0])


def powers(exponent: int) -> tuple[float, float]:
    """Two e4m3 numbers whose product is 2^exponent."""
    return 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)


def kept(first: int) -> int:
    """The fraction bits that are kept next to a product of 1: of eight products of 2^−k from place
    `first` on."""
    found = 0
    for k in range(4, 18):
        small = {place: powers(-k) for place in range(first, first + 8)}
        rest = one_sum({0: (1.0, 1.0)} | small) - 1.0
        assert rest in (0.0, 8 * 2.0**-k), k
        if rest:
            assert found == k - 1 or k == 4, "bits that are kept come first"
            found = k
    return found


@pytest.mark.parametrize("first", [1, STEP, DEPTH - 8])
def test_a_sum_keeps_as_many_bits_of_fraction_as_the_contract_says(first: int) -> None:
    """A sum keeps the contract's fraction bits, of the same step's products and earlier sums."""
    assert kept(first) == FRACTION


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_terms_are_cut_off_towards_zero_one_by_one(sign: float) -> None:
    """Each term is truncated by itself: eight products of 1.75 · 2^−13 add 2^−13 each."""
    x, w = powers(-FRACTION)
    small = dict.fromkeys(range(1, 9), (sign * 1.75 * x, w))
    assert one_sum({0: (1.0, 1.0)} | small) - 1.0 == sign * 8 * 2.0**-FRACTION


def matrices(seed: int, positive: bool) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, ROWS, DEPTH)) * np.exp2(rng.integers(-3, 4, (2, ROWS, 1)))
    return (abs(a), abs(b)) if positive else (a, b)


@pytest.mark.parametrize("positive", [False, True])
def test_a_k_tile_is_within_the_bound_and_near_the_model(positive: bool) -> None:
    contract = ScaledImplicitGemmWgmma().contract
    equal = total = 0
    for seed in range(20):
        a, b = (round_to_e4m3(one) for one in matrices(seed, positive))
        found = sums(a, b).astype(np.float64)
        exact, size = a @ b.T, np.abs(a) @ np.abs(b).T
        assert (np.abs(found - exact) <= summation_error(DEPTH, contract, runs=1) * size).all()
        model = UNIT(Products(b.T.astype(np.float32), a.astype(np.float32)))
        equal, total = equal + int((model == found).sum()), total + found.size
    print(f"\n{equal:,} of {total:,} sums are those of the model")
    assert equal / total > 0.9


@pytest.mark.parametrize("channels", [512, 528])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_pooling_and_classifier_in_one_launch_give_the_bits_of_two(
    batch: int, channels: int
) -> None:
    """One launch gives the bits of two for 7×7 pixels, whose sums are exact; see
    kernels/float8/gap_linear.cu."""
    backend, fused = Backend(), ScaledGapLinear()
    problem = Problem(scaled(channels, 1000), ((batch, channels, 7, 7),))
    pooling, layer = parts_of(problem)
    for seed in range(3):
        case = make_case(fused, problem, "normal", seed)
        means = run_kernel(backend, ScaledGap(layout=Layout.NHWC), pooling, *case.inputs)
        two = run_kernel(backend, ScaledWarpDot(), layer, means, *case.weights)
        one = run_kernel(backend, fused, problem, *case.inputs, *case.weights)
        assert np.unique(one).size > 100
        np.testing.assert_array_equal(one, two)
