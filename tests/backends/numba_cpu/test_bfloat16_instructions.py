"""`vdpbf16ps` as this CPU computes it, and LLVM's instructions for bfloat16.

The bounds of `r18_numba_cpu.bfloat16.products` rest on the tests of the first part.
"""

from __future__ import annotations

import math
import platform
import re
from fractions import Fraction

import ml_dtypes
import numba
import numpy as np
import pytest

from r18.backend import Array
from r18_numba_cpu import compiled
from r18_numba_cpu.kernels.arguments import Depth
from support import output_of

pairs, micro_kernel, vector = (
    compiled.module(name) for name in ("bfloat16.pairs", "micro_kernel", "vector")
)
arguments = compiled.module("arguments")
COLUMNS = micro_kernel.COLUMNS
LEAST = Fraction(2) ** -126

only_with_pairs = pytest.mark.skipif(not pairs.AVAILABLE, reason="this CPU has no AVX512-BF16")


# -- rounding ----------------------------------------------------------------------------------


def floats(bits: Array) -> Array:
    """bfloat16 numbers as float32, from their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@numba.njit
def products(rows, a, b, c, length, terms):  # type: ignore[no-untyped-def]
    depth, tile = Depth(1, length, 0), arguments.Tile(0, 0, 0)
    multiply_pairs(rows, a, 0, length, b, 0, depth, c, 0, False, tile, terms)


multiply_pairs = pairs.multiply


def multiplied(a: Array, b: Array) -> Array:
    """The sums (rows, COLUMNS) of pairs a (rows, K) and b (K, COLUMNS), bits of bfloat16."""
    rows, depth = a.shape
    nothing = np.zeros(COLUMNS, np.float32)
    how = arguments.Epilogue(False, False)
    terms = arguments.Summed(nothing, np.zeros(1, np.uint16), np.zeros(1, np.uint16), how)
    c = np.zeros(rows * COLUMNS, np.float32)
    packed = b.reshape(depth // 2, 2, COLUMNS).transpose(0, 2, 1).reshape(-1)
    products(rows, a.reshape(-1), np.ascontiguousarray(packed), c, depth, terms)
    return c.reshape(rows, COLUMNS)


def rounded(value: Fraction) -> Fraction:
    """The value rounded to 24 bits, to nearest, ties to even; zero below 2⁻¹²⁶."""
    if value == 0:
        return value
    exponent = math.frexp(float(value))[1] - 1
    exponent += abs(value) >= Fraction(2) ** (exponent + 1)  # the float64 was rounded down,
    exponent -= abs(value) < Fraction(2) ** exponent  # or up
    unit = Fraction(2) ** (exponent - 23)
    found = round(value / unit) * unit
    return found if abs(found) >= LEAST else Fraction(0)


def expected(a: Array, b: Array) -> Fraction:
    """One output: of each pair the second product is added first, by fused multiply-adds."""
    total = Fraction(0)
    wide = [
        [Fraction(float(v)) if abs(v) >= float(LEAST) else Fraction(0) for v in floats(bits)]
        for bits in (a, b)
    ]
    factors = list(zip(*wide, strict=True))
    for first in range(0, len(factors), 2):
        for x, w in reversed(factors[first : first + 2]):
            total = rounded(total + x * w)
    return total


@only_with_pairs
@pytest.mark.parametrize("spread", [1, 4, 12, 63])
def test_pairs_are_two_fused_multiply_adds_of_the_upper_half_first(spread: int) -> None:
    """Pairs have the bits of two fused multiply-adds, upper half first; other orders differ."""
    rng = np.random.default_rng(spread)

    def bits(*shape: int) -> Array:
        signs, exponents = rng.integers(0, 2, shape), rng.integers(-spread, spread + 1, shape)
        found = signs << 15 | (127 + exponents) << 7 | rng.integers(0, 128, shape)
        return found.astype(np.uint16)

    a, b = bits(14, 24), bits(24, COLUMNS)
    seen = multiplied(a, b)
    assert np.isfinite(seen).all()
    for row, column in np.ndindex(seen.shape):
        assert Fraction(float(seen[row, column])) == expected(a[row], b[:, column])
    swapped = [k ^ 1 for k in range(24)]
    differ = (multiplied(a[:, swapped], b[swapped]) != seen).mean()
    if spread == 1:  # so few binades are added exactly
        assert differ == 0
    elif spread < 63:  # of terms so far apart one is the sum
        assert differ > 0.1


def of_one(*factors: tuple[float, float]) -> float:
    """The sum of the products of factor pairs, which bfloat16 must hold."""
    depth = 2 * len(factors)
    a, b = np.zeros((1, depth), np.uint16), np.zeros((depth, COLUMNS), np.uint16)
    wide = np.array(factors, np.float32).view(np.uint32)
    assert not (wide & 0xFFFF).any()
    a[0, ::2], b[::2, 0] = (wide >> 16).T
    return float(multiplied(a, b)[0, 0])


@only_with_pairs
def test_what_is_subnormal_counts_as_zero() -> None:
    least = float(LEAST)
    assert of_one((least / 2, 2.0**100)) == 0.0  # a factor
    assert of_one((least, 2.0**100)) == 2.0**-26
    assert of_one((2.0**-63, 2.0**-63)) == least
    assert of_one((2.0**-63, 2.0**-64)) == 0.0  # a sum
    assert of_one((2.0**-63, 2.0**-64), (2.0**-63, 2.0**-64)) == 0.0
    assert of_one((1.5 * least, 1.0), (-least, 1.0)) == 0.0
    assert of_one((2.0**-63, 2.0**-63), (1.5 * 2.0**-63, 2.0**-63)) == 2.5 * least


@only_with_pairs
def test_infinities_and_nan() -> None:
    assert of_one((np.inf, 1.0)) == np.inf
    assert np.isnan(of_one((np.inf, 0.0)))
    assert np.isnan(of_one((np.inf, 1.0), (-np.inf, 1.0)))
    assert of_one((2.0**127, 2.0), (-(2.0**127), 1.0)) == np.inf


def test_stored_numbers_are_rounded_to_the_nearest() -> None:
    """Stored numbers round to nearest: all bfloat16, numbers between them, the ends, and NaN."""
    halves = np.arange(1 << 16).astype(np.uint16)
    finite = halves[np.isfinite(floats(halves))]
    steps = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = ((finite.astype(np.uint32) << 16)[:, None] | steps).reshape(-1)
    wide = np.concatenate([bits.view(np.float32), np.array([np.inf, -np.inf, np.nan], np.float32)])
    out = np.zeros(len(wide), np.uint16)
    store_lanes, load_lanes, lanes = vector.store_lanes, vector.load_lanes, vector.LANES

    @numba.njit
    def copy(x, to):  # type: ignore[no-untyped-def]
        for at in range(0, x.size, lanes):
            count = min(lanes, x.size - at)
            store_lanes(to, at, load_lanes(x, at, count), count)

    copy(wide, out)
    with np.errstate(over="ignore"):
        nearest = wide.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(floats(out), nearest)
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    kept = np.zeros(4, np.uint16)
    copy(nans, kept)
    assert np.isnan(floats(kept)).all()
    again = np.zeros(len(halves), np.float32)
    copy(halves, again)
    np.testing.assert_array_equal(again, floats(halves))


# -- code --------------------------------------------------------------------------------------


@only_with_pairs
def test_a_register_tile_is_products_alone() -> None:
    """The loop over K has a `vdpbf16ps` for each register of the tile and spills nothing."""
    multiplied(np.ones((14, 2), np.uint16), np.ones((2, COLUMNS), np.uint16))
    (assembly,) = products.inspect_asm().values()
    count = micro_kernel.ROWS * micro_kernel.VECTORS
    blocks = re.findall(r"^(\.LBB\w+):(.*?)(?=^\.LBB|\Z)", assembly, re.MULTILINE | re.DOTALL)
    loops = [
        block
        for name, block in blocks
        if block.count("vdpbf16ps") == count
        and re.search(rf"\tj\w+\t{re.escape(name)}$", block, re.M)
    ]
    assert loops
    for loop in loops:
        body = loop[: loop.rindex("vdpbf16ps")]
        assert "rsp" not in body
        assert len(re.findall("vbroadcast|vpbroadcast", body)) == micro_kernel.ROWS
        moves = re.findall(r"vmov\w+\t(.*)", body)
        assert all(re.fullmatch(r"\S*\(\S+\), %zmm\d+", move) for move in moves)  # loads of B
        assert len(moves) == micro_kernel.VECTORS


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="LLVM here has no x86")
def test_llvm_selects_amx_and_spills_nothing() -> None:
    """LLVM, for a Sapphire Rapids, selects AMX instructions and spills nothing. Not run."""
    assembly = output_of("""
import llvmlite.binding as binding
found = binding.get_host_cpu_features()
wanted = ("amx-tile", "amx-int8", "amx-bf16", "avx2", "fma", "bmi", "bmi2", "avx512f", "avx512bw",
          "avx512cd", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16")
found.update(dict.fromkeys(wanted, True))
binding.get_host_cpu_features = lambda: found
binding.get_host_cpu_name = lambda: "sapphirerapids"

import numpy as np
from r18_numba_cpu import compiled

kernel = compiled.module("bfloat16.implicit_gemm").implicit_gemm
kinds = "uint16 uint32 float32 uint16 uint16 float32 uint16 int64"
arrays = [np.zeros(1, kind) for kind in kinds.split()]
print(compiled.module("jit").assembly(kernel, (*arrays, np.zeros(8, np.int64))))
""")

    assembly = re.sub(r"[ \t]*#.*", "", assembly)  # comments name instructions, too

    def count(pattern: str, text: str) -> int:
        return len(re.findall(pattern, text))

    assert count(r"\tldtilecfg\t", assembly) == 1  # once a panel
    assert count(r"\ttilerelease", assembly) == 1
    assert count(r"\ttilestored\t", assembly) == 4
    assert not count("tdpb[su]", assembly)
    # A step over K has no jump, and none leads into it.
    stretches = re.split(r"^(?:\.LBB\w+:|\tj\w+\t.*)", assembly, flags=re.MULTILINE)
    kinds = set()
    for step in (stretch for stretch in stretches if "tdpbf16ps" in stretch):
        found = re.findall(r"\ttdpbf16ps\t%tmm(\d), %tmm(\d), %tmm(\d)", step)
        # AT&T's order: B, A, C. Each tile that is loaded serves all its products.
        order = [(int(c), int(a), int(b)) for b, a, c in found]
        one, two = [(0, 4, 6), (1, 4, 7)], [(0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)]
        each = two if two[2] in order else one
        assert order == each * (len(order) // len(each))
        assert count(r"\ttileloadd\t", step) == len(order) // len(each) * (2 + len(each) // 2)
        kinds.add(len(each))
        assert "mm" not in re.sub("%tmm", "", step)  # no vector
        assert not count(r"\tmov\w*\t%\w+, \S*\(%rsp\)", step)  # no spill
    assert kinds == {2, 4}
