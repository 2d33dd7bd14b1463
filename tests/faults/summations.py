"""Odd but correct ways to sum the products of an output: the arithmetic of the control kernels.

Each is a function of `Products` that returns all O × P sums, a loop over the K products of whole
arrays. None makes an infinity or NaN that the sum itself does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from r18.backend import Array

SORTED_ELEMENTS = 1 << 21
"""The number of products that are held at once for sorting."""


@dataclass(frozen=True, eq=False)
class Products:
    """K products for each of O × P outputs, in the accumulator's dtype.

    x:     (K, P), the inputs that each output reads, channel by channel.
    w:     (O, K).
    taps:  window positions a channel: product k is of channel k // taps.
    start: what sums begin with, to broadcast over (O, P); used by `in_order` only.
    """

    x: Array
    w: Array
    taps: int = 1
    start: Array | float = 0.0

    def __len__(self) -> int:
        return len(self.x)

    def term(self, k: int) -> Array:
        """Product k of every output, rounded: (O, P)."""
        return np.asarray(self.w[:, k, None] * self.x[k])

    def wide(self, k: int) -> Array:
        """Product k of every output, in float64, which is exact for factors of at most 26 bits."""
        return np.asarray(np.multiply(self.w[:, k, None], self.x[k], dtype=np.float64))

    def begin(self) -> Array:
        """The start of sums, as an array of its own."""
        return np.full((len(self.w), self.x.shape[1]), self.start, self.x.dtype)


Summation = Callable[[Products], Array]
Order = Callable[[int, int], Iterable[int]]
"""(K, taps) → the products' numbers in the order of addition."""


# -- orders ------------------------------------------------------------------------------------


def forward(count: int, taps: int) -> Iterable[int]:
    """In memory order: channel by channel."""
    return range(count)


def backward(count: int, taps: int) -> Iterable[int]:
    """The last product first."""
    return reversed(range(count))


def shuffled(count: int, taps: int) -> Iterable[int]:
    """A permutation that depends only on K."""
    return [int(k) for k in np.random.default_rng(count).permutation(count)]


def outside_in(count: int, taps: int) -> Iterable[int]:
    """The first product, the last, the second, the last but one, ..."""
    return sorted(range(count), key=lambda k: min(k, count - 1 - k))


def tap_major(count: int, taps: int) -> Iterable[int]:
    """All channels of the first tap, then of the second, ..., as implicit GEMM over NHWC does."""
    return sorted(range(count), key=lambda k: (k % taps, k))


# -- one accumulator ---------------------------------------------------------------------------


def in_order(order: Order) -> Summation:
    """One product after the other; each product and each sum is rounded."""

    def total(products: Products) -> Array:
        sums = products.begin()
        for k in order(len(products), products.taps):
            sums += products.term(k)
        return sums

    return total


def fused(order: Order) -> Summation:
    """Fused multiply-add: each product and sum in float64, rounded once."""

    def total(products: Products) -> Array:
        sums = products.begin()
        for k in order(len(products), products.taps):
            sums = (sums + products.wide(k)).astype(sums.dtype)
        return sums

    return total


def fused_pairs(products: Products) -> Array:
    """Two products and the sum so far, added at once and rounded once."""
    sums = products.begin()
    for k in range(0, len(products), 2):
        both = sums + products.wide(k)
        if k + 1 < len(products):
            both += products.wide(k + 1)
        sums = both.astype(sums.dtype)
    return sums


def kahan(products: Products) -> Array:
    """Compensated: what each addition loses is added to the next term."""
    sums, lost = products.begin(), products.begin()
    for k in range(len(products)):
        term = products.term(k) - lost
        grown = sums + term
        # Infinities leave nothing to compensate; their difference would be NaN.
        lost = np.where(np.isfinite(grown), (grown - sums) - term, 0).astype(sums.dtype)
        sums = grown
    return sums


def flushed(products: Products) -> Array:
    """In order, with every subnormal factor, product and sum replaced by zero."""
    normal = _of_normal(products)
    sums = normal.begin()
    for k in range(len(normal)):
        sums = _flush(sums + _flush(normal.term(k)))
    return sums


def flushed_pairs(products: Products) -> Array:
    """`vdpbf16ps`: of two products the second first, then the first, each by a fused multiply-add;
    every subnormal factor and sum is replaced by zero."""
    normal = _of_normal(products)
    sums = normal.begin()
    for k in range(0, len(normal), 2):
        for i in (k + 1, k)[len(normal) - k == 1 :]:
            sums = _flush((sums + normal.wide(i)).astype(sums.dtype))
    return sums


def flushed_tiles(step: int) -> Summation:
    """`tdpbf16ps`: of `step` products a chain of the even and a chain of the odd ones by fused
    multiply-adds, then their sum, which is added to the sum so far; flushed as above."""

    def total(products: Products) -> Array:
        normal = _of_normal(products)
        sums = normal.begin()
        for first in range(0, len(normal), step):
            chains = []
            for half in (first, first + 1):
                chain = np.zeros_like(sums)
                for i in range(half, min(first + step, len(normal)), 2):
                    chain = _flush((chain + normal.wide(i)).astype(sums.dtype))
                chains.append(chain)
            sums = _flush(sums + _flush(chains[0] + chains[1]))
        return sums

    return total


def _flush(values: Array) -> Array:
    tiny = np.finfo(values.dtype).tiny
    return np.where(np.abs(values) < tiny, values.dtype.type(0), values)


def _of_normal(products: Products) -> Products:
    return replace(products, x=_flush(products.x), w=_flush(products.w))


# -- several partial sums ----------------------------------------------------------------------


def pairwise_sum(parts: Iterable[Array]) -> Array:
    """Add arrays as a balanced binary tree, holding at most log₂ of them."""
    held: list[tuple[int, Array]] = []  # (height of the tree, its sum)
    for part in parts:
        height, total = 0, part
        while held and held[-1][0] == height:
            total = held.pop()[1] + total
            height += 1
        held.append((height, total))
    total = held.pop()[1]
    while held:
        total = held.pop()[1] + total
    return total


def pairwise(products: Products) -> Array:
    """A balanced binary tree over all products."""
    return pairwise_sum(products.term(k) for k in range(len(products)))


def blocked(count: int, inner: Summation) -> Summation:
    """At most `count` runs of neighbouring products, each summed by `inner`, added pairwise."""

    def total(products: Products) -> Array:
        run = -(-len(products) // count)
        starts = range(0, len(products), run)
        return pairwise_sum(inner(_some(products, slice(k, k + run))) for k in starts)

    return total


def interleaved(count: int) -> Summation:
    """`count` lanes: lane i takes products i, i + count, ...; lanes are added pairwise."""

    def total(products: Products) -> Array:
        lanes = range(min(count, len(products)))
        inner = in_order(forward)
        return pairwise_sum(inner(_some(products, slice(i, None, count))) for i in lanes)

    return total


def channel_by_channel(products: Products) -> Array:
    """A sum for each channel over its taps, and then of the channels, the last first."""
    run = products.taps
    sums = products.begin()
    for k in range(0, len(products), run)[::-1]:
        sums += in_order(forward)(_some(products, slice(k, k + run)))
    return sums


def tap_by_tap(products: Products) -> Array:
    """A sum for each tap over its channels, and then of the taps."""
    sums = products.begin()
    for tap in range(products.taps):
        sums += in_order(forward)(_some(products, slice(tap, None, products.taps)))
    return sums


def signs_apart(products: Products) -> Array:
    """The positive products, the negative products, and then both sums."""
    positive, negative = products.begin(), products.begin()
    for k in range(len(products)):
        term = products.term(k)
        positive += np.maximum(term, 0)
        negative += np.minimum(term, 0)
    return positive + negative


def _some(products: Products, which: slice) -> Products:
    return replace(products, x=products.x[which], w=products.w[:, which], start=0.0)


# -- all products at once ----------------------------------------------------------------------


def by_magnitude(descending: bool) -> Summation:
    """Each output in its own order: by magnitude, rising or falling."""

    def total(products: Products) -> Array:
        step = max(1, SORTED_ELEMENTS // (len(products) * len(products.w)))
        sums = products.begin()
        for p in range(0, products.x.shape[1], step):
            some = replace(products, x=products.x[:, p : p + step])
            terms = np.stack([some.term(k) for k in range(len(some))])
            order = np.argsort(np.abs(terms), axis=0)
            terms = np.take_along_axis(terms, order[::-1] if descending else order, axis=0)
            sums[:, p : p + step] = np.add.accumulate(terms, axis=0)[-1]
        return sums

    return total


def matrix_product(products: Products) -> Array:
    """The matrix product, in the library's order."""
    sums: Array = products.w @ products.x
    return sums


def in_float64(products: Products) -> Array:
    """In float64, rounded once at the end."""
    sums: Array = products.w.astype(np.float64) @ products.x.astype(np.float64)
    return sums.astype(products.x.dtype)


# -- tensor cores ------------------------------------------------------------------------------


def tensor_core(block: int, guard_bits: int = 0, significand: int = 24) -> Summation:
    """`block` exact products and the sum so far, aligned to the largest, cut off, added, cut off.

    guard_bits: bits kept below the last one of the largest while adding: 0 on V100, 1 on A100, 2
    on H100 (Fasi et al. 2021, §4).
    """

    def total(products: Products) -> Array:
        sums = products.begin().astype(np.float64)
        for k in range(0, len(products), block):
            ks = range(k, min(k + block, len(products)))
            terms = np.stack([sums, *(products.wide(i) for i in ks)])
            plain = terms.sum(axis=0)
            unit = np.exp2(_exponent(np.abs(terms).max(axis=0)) - (significand + guard_bits))
            aligned = (np.trunc(terms / unit) * unit).sum(axis=0)
            unit = np.exp2(np.maximum(_exponent(aligned) - significand, -149))
            sums = np.where(np.isfinite(plain), np.trunc(aligned / unit) * unit, plain)
        return sums.astype(products.x.dtype)

    return total


def promoted(run: int, inner: Summation) -> Summation:
    """Runs of neighbouring products, each summed by `inner`, added one after the other."""

    def total(products: Products) -> Array:
        sums = products.begin()
        for k in range(0, len(products), run):
            sums = sums + inner(_some(products, slice(k, k + run)))
        return sums

    return total


def _exponent(values: Array) -> Array:
    """e with 2^(e−1) ≤ |v| < 2^e, and 0 for 0 and for what is not finite."""
    return np.frexp(np.where(np.isfinite(values), values, 0.0))[1].astype(np.float64)


# -- factors -----------------------------------------------------------------------------------

Rounding = Callable[[Array], Array]
"""A rounding of the products' factors, float32 to float32."""

_LOW = np.uint32(0x1FFF)
"""The 13 bits of a float32 significand that tf32 lacks."""


def tf32_nearest(values: Array) -> Array:
    """To tf32, ties to even."""
    bits = values.view(np.uint32)
    last = (bits >> np.uint32(13)) & np.uint32(1)
    return _finite_or((bits + np.uint32(0xFFF) + last) & ~_LOW, values)


def tf32_away(values: Array) -> Array:
    """To tf32, ties away from zero, as `cvt.rna.tf32.f32` does."""
    return _finite_or((values.view(np.uint32) + np.uint32(0x1000)) & ~_LOW, values)


def tf32_cut(values: Array) -> Array:
    """To tf32 by ignoring the low bits, as the unit treats a float32 register."""
    return _finite_or(values.view(np.uint32) & ~_LOW, values)


def halves(values: Array) -> tuple[Array, Array]:
    """The two float16 halves of each float32: of v, and of 2¹¹(v − the first half)."""
    with np.errstate(over="ignore", invalid="ignore"):
        high = values.astype(np.float16).astype(np.float32)
        low = ((values - high) * np.float32(2**11)).astype(np.float16).astype(np.float32)
    return high, low


def split(main: Summation, cross: Summation | None = None, *, paired: bool = False) -> Summation:
    """Split products: the products of high halves and the crossed products, summed separately.

    cross:  how the crossed products are summed, if not like the others. All of one kind come before
            all of the other; paired: the two of a product are adjacent.

    An infinity among the factors gives NaN, as its difference from its high half does.
    """

    def total(products: Products) -> Array:
        (x, x_low), (w, w_low) = halves(products.x), halves(products.w)
        crossed_x, crossed_w = np.concatenate([x, x_low]), np.concatenate([w_low, w], axis=1)
        if paired:
            order = np.arange(2 * len(products)).reshape(2, -1).T.reshape(-1)
            crossed_x, crossed_w = crossed_x[order], crossed_w[:, order]
        with np.errstate(invalid="ignore"):
            first = main(replace(products, x=x, w=w))
            second = (cross or main)(replace(products, x=crossed_x, w=crossed_w, start=0.0))
            joined: Array = (first + second.astype(np.float64) * 2.0**-11).astype(np.float32)
        return joined

    return total


def _finite_or(bits: Array, values: Array) -> Array:
    return np.where(np.isfinite(values), bits.view(np.float32), values)
