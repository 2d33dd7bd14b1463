"""The order in which products are added, as a tree: FPRev (arXiv 2411.00442).

In a sum of n ones, term i is replaced by M and term j by −M, with M so large that adding a one to
it changes nothing. Terms added before the two meet are lost, so n minus the result is the number
of terms below the node where they meet. Those numbers, for every pair, are the tree. A node with
more than two children is an addition of several terms at once, as tensor cores do it.

The order tells how far below its bound a function is likely to stay. It is printed, and not judged
by: it holds for sums of this length, and the next length may have another.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from r18.backend import Array
from r18_oracle.functions.arithmetic import BITS, SUMS, Arithmetic
from r18_oracle.probe.dots import OUTPUTS, Dots

WIDEST = 64
"""The bits of the widest sums whose order is looked at, those of x86's `long double`."""
LEAST = 2.0**-24
"""The smallest number of float16."""
TERMS = (63, 64)
"""Terms of the sum that is examined: the first number that the function takes; about 2000 pairs."""


@dataclass(frozen=True)
class Order:
    """terms: of the sum. depth: the additions on the longest path from a term to the result.

    widest: the most terms that one addition takes; 2 unless several are added at once.
    """

    terms: int
    depth: int
    widest: int

    def words(self) -> str:
        least = (self.terms - 1).bit_length()
        if self.widest > 2:
            how = f"up to {self.widest} terms at once, {self.depth} steps deep"
        elif self.depth == self.terms - 1:
            how = "one after the other"
        elif self.depth == least:
            how = "pairwise"
        else:
            how = f"in a tree {self.depth} deep, between pairwise ({least}) and one after the other"
            how += f" ({self.terms - 1})"
        return f"adds {self.terms} products {how}"


@dataclass(frozen=True)
class Unseen:
    """Sums in which no M hides the ones: they keep more bits than were tried, or inputs span."""

    def words(self) -> str:
        return "its sums keep too many bits to show their order"


def order_of(dots: Dots, arithmetic: Arithmetic, shape: tuple[int, int]) -> Order | Unseen | None:
    """The tree of a sum; None where no tree fits what was seen. shape: of the calls, by `shape_of`.

    A function that stores partial sums in a narrow format keeps those parts in a wider one, so M
    and −M are tried as they are for each format that is not narrower than its sums.
    """
    terms, columns = shape
    formats = (arithmetic.storage, arithmetic.factors, arithmetic.sums)
    widths = [BITS[name] for name in reversed(SUMS) if BITS[name] >= BITS[arithmetic.sums]]
    hides = False
    for bits in (*widths, WIDEST):
        large = 2.0**14 if "float16" in formats else 2.0 ** (bits + 16)
        # So small that all of them together change M by less than half its last bit.
        unit = large * 2.0 ** -(bits + 9)
        if "float16" in formats and unit < LEAST:
            break
        below = _below(dots, terms, columns, large, unit)
        tree = None if below is None else _depths(below, tuple(range(terms)))
        if tree is not None:
            return Order(terms, *tree)
        hides = hides or below is None or bool(below.max() > 2)  # at least M and −M meet there
    return None if hides else Unseen()


def shape_of(dots: Dots) -> tuple[int, int] | None:
    """The terms of a sum, and the outputs of a call that poses every pair; None where the function
    takes no such call."""
    for terms, columns in product(TERMS, (1, OUTPUTS)):
        pairs = terms * (terms - 1) // 2
        if terms % dots.form.multiple == 0 and dots.takes(pairs, terms, columns):
            return terms, columns
    return None


def _below(dots: Dots, terms: int, columns: int, large: float, unit: float) -> Array | None:
    """For each pair, the number of terms below the node where they meet; None if not integers."""
    pairs = list(combinations(range(terms), 2))
    x = np.full((len(pairs), terms), unit)
    for row, (i, j) in enumerate(pairs):
        x[row, i], x[row, j] = large, -large
    left = dots(x, np.ones((columns, terms)))[:, 0] / unit
    if not np.array_equal(left, np.round(left)) or left.min() < 0 or left.max() > terms - 2:
        return None
    below = np.zeros((terms, terms), np.int64)
    for (i, j), count in zip(pairs, left, strict=True):
        below[i, j] = below[j, i] = terms - int(count)
    return below


def _depths(below: Array, terms: tuple[int, ...]) -> tuple[int, int] | None:
    """Depth and largest number of children of the tree over these terms; None if there is none.

    Two terms are below the same child of the root if they meet below it.
    """
    if len(terms) == 1:
        return 0, 2
    whole = len(terms)
    children: list[list[int]] = []
    for term in terms:
        same = [child for child in children if below[term, child[0]] < whole]
        if len(same) > 1:
            return None
        if same:
            same[0].append(term)
        else:
            children.append([term])
    if len(children) < 2:
        return None
    inner = [_depths(below, tuple(child)) for child in children]
    if any(one is None for one in inner):
        return None
    known = [one for one in inner if one is not None]
    return 1 + max(depth for depth, _ in known), max(len(children), *(wide for _, wide in known))


__all__ = ["Order", "Unseen", "order_of", "shape_of"]
