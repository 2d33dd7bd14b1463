"""Bias: whether the errors of a kernel that rounds to nearest lean to one side.

A bound forgives a rounding that is twice too large if others are smaller; a mean does not. Over
the elements i of an output, with c_i = 1 or c_i = sign(y_i), consider T = Σ c_i (ŷ_i − y_i).

To first order ŷ_i − y_i is a sum of the δ of the operations that led to it, each times the
intermediate that was rounded. Higham and Mary (SIAM J. Sci. Comput. 41(5), 2019, Model 2.1) model
the δ of rounding to nearest as independent, with mean zero and |δ| ≤ u. Then T is a sum of
independent terms with mean zero, and Hoeffding's inequality (J. Amer. Statist. Assoc. 58, 1963,
Theorem 2) gives |T| ≤ λ·√Σ a² with probability 1 − 2 exp(−λ²/2), a being the largest magnitude of
each term:

- Sums: n operations of an output, each on an intermediate of at most S_i: n terms of u·S_i.
- Storage: one term of u_out·(|y_i| + E_i), one more where the sum itself is stored first.
- Equal sums, such as those that see only padding, come from equal operations and have equal δ, and
  the last bits of a residual are above what the storage drops of them: the a of outputs whose sum,
  without the residual, is the same float32 add up before they are squared. If the sum is stored
  first, the storage drops the last bits of the bias alone: there the a of a channel add up.
- Factors that are rounded (tf32): the δ of one weight or pixel v is common to all outputs that read
  it, so it is one term, of u_in·|v|·∂(Σ_i S_i)/∂|v|.

Effects outside the model are added in full: a bias or residual, u·S_i each, since all outputs
that share a small one round it alike (a sum of one binade is a multiple of its last bit); the
rounding to storage of an output whose products are too small to move its last bit by some units,
since then bias and residual alone decide it; where the line is exceeded, all roundings of outputs
that one product dominates (`led`); underflow; the float64 reference's own error; and products of
several δ, at most c²·S_i with c = γ_n (and f² for factors). Both choices of c_i are tested, so each
with half of `DELTA`.
Truncated factors move T by about 0.7·u_in·Σ|y_i| for c_i = sign(y_i), which exceeds λ·√Σ a² from
some hundreds of weights and pixels on.

An element takes part only if |y_i| exceeds its bound: the others may be cut by a ReLU, and what is
cut is cut on one side. That choice does not depend on the roundings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from r18.backend import Array
from r18.graph.ops import Problem
from r18_oracle.judge.reference import no_kernel_running, sum_spec
from r18_oracle.threads import threads_for

DELTA = 1e-9
"""The probability, per output, that a kernel which rounds as the model says is accused."""
LINE = math.sqrt(2 * math.log(4 / DELTA))
"""λ for two tests, of c_i = 1 and of c_i = sign(y_i), that share `DELTA`."""
FEWEST = 64
"""Elements that must take part."""


@dataclass(frozen=True, eq=False)
class Drift:
    """The limits on the sum of an output's errors.

    steps:   √Σ a² over each element's own terms. shared: Σ a² over the terms of the factors.
    certain: per element, the part of the limit that is added in full.
    alike:   per element, a number that elements with equal roundings share.
    """

    steps: Array
    shared: float
    certain: Array
    alike: Array
    _last: list[Array] = field(default_factory=list, repr=False)

    def ratio(
        self, error: Array, y: Array, chosen: Array, led: Array | None = None
    ) -> float | None:
        """max |T| over its line; above 1 is a fault. None if too few elements are chosen.

        led: the elements whose own terms are added in full.
        """
        if np.count_nonzero(chosen) < FEWEST:
            return None
        steps = np.broadcast_to(self.steps, y.shape)[chosen]
        certain = float(np.broadcast_to(self.certain, y.shape)[chosen].sum())
        if led is not None:
            certain += float(steps[led[chosen]].sum())
            steps = np.where(led[chosen], 0.0, steps)
        # By Minkowski's inequality √Σ_k (Σ_i a_ik)² ≤ Σ_i √Σ_k a_ik², for terms k of elements i.
        own = np.bincount(self._groups(chosen), steps)
        line = LINE * math.sqrt(float(np.square(own).sum()) + self.shared) + certain
        leans = error[chosen]
        total = max(abs(float(leans.sum())), abs(float((leans * np.sign(y[chosen])).sum())))
        if total == 0:
            return 0.0
        return total / line if math.isfinite(line) and line > 0 else None

    def _groups(self, chosen: Array) -> Array:
        """`_numbered` of the chosen elements. Sorted once: kernels with one contract share an
        answer, and nearly all of their outputs choose the same elements."""
        if not self._last or not np.array_equal(self._last[0], chosen):
            self._last[:] = chosen, _numbered(self.alike[chosen])
        return self._last[1]


def _numbered(alike: Array) -> Array:
    """A number from 0 for each of some elements, (n,): equal where they are equal in float32, as no
    NaN is.

    The bits of each number and its place are sorted as one integer, in half the time of `argsort`.
    """
    narrow = alike.astype(np.float32) + np.float32(0)  # both zeros have the same bits
    keys = narrow.view(np.uint32).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(narrow.size, dtype=np.uint64)
    keys.sort()
    order = keys.astype(np.uint32)  # the lower half
    narrow = narrow[order]
    groups = np.zeros(narrow.size, np.int32)
    groups[order[1:]] = np.cumsum(narrow[1:] != narrow[:-1], dtype=np.int32)
    return groups


def _factors(
    problem: Problem, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The pixels and weights that are multiplied, of each sum of products."""
    summands = sum_spec(problem.op).summands(problem)
    return [tensor for one in summands for tensor in (inputs[one.input], weights[one.weight])]


def influence(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> float:
    """Σ (|v|·∂(Σ S)/∂|v|)² over the pixels and weights v, with S the sums of absolute products."""
    no_kernel_running()
    spec = sum_spec(problem.op)
    given = [[torch.from_numpy(np.abs(array)) for array in arrays] for arrays in (inputs, weights)]
    factors = [factor.requires_grad_() for factor in _factors(problem, *given)]
    with torch.enable_grad(), threads_for(sum(factor.numel() for factor in factors)):
        total = spec.sums(problem.op, *map(tuple, given)).sum()
        slopes = torch.autograd.grad(total, factors)
    parts = (v.detach() * slope for v, slope in zip(factors, slopes, strict=True))
    return float(sum(part.square().sum() for part in parts))


def led(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """Whether one product p may be at least half of S, the sum of absolute products; per output.

    The model fails there: products of factors with few bits have few distinct rounding errors, and
    255 times any pixel of bfloat16 is rounded down. All outputs that share such a weight or pixel
    have errors of one sign. Elsewhere the other products add up to more than S/2, or 64 units in
    the last place of bfloat16. If p ≥ S/2, then Σ p² ≥ S²/4; this condition is tested.
    """
    no_kernel_running()
    spec = sum_spec(problem.op)

    def sums(power: int) -> Array:
        given = [
            tuple(torch.from_numpy(np.abs(array) ** power) for array in arrays)
            for arrays in (inputs, weights)
        ]
        size = sum(factor.numel() for factor in _factors(problem, *given))
        with torch.inference_mode(), threads_for(size):
            made = spec.sums(problem.op, *given)
        return np.asarray(made.numpy())

    return np.asarray(sums(2) >= sums(1) ** 2 / 4)


__all__ = ["DELTA", "FEWEST", "LINE", "Drift", "influence", "led"]
