"""`OpSpec`: everything the oracle knows about one op.

An op's file in this folder defines its spec: the float64 reference, how problems are drawn and
shrunk, its corners, its inputs, and the rounding contracts that its kernels may declare. The
modules that draw, judge and walk ask the spec and hold no tables by op. Shapes, semantics and the
work in operations are the op class's own (`r18.graph.ops`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st

from r18.backend import Array, Kernel
from r18.graph.ops import Op, Problem, Shape
from r18_oracle.generate.sizes import BEYOND_INDEX

O = TypeVar("O", bound=Op)  # noqa: E741
Arrays = tuple[Array, ...]
Tensors = tuple[torch.Tensor, ...]
Rng = np.random.Generator
Draw = Callable[[Shape], Array]
Numbers = dict[str, int]
"""The sizes and flags that make up a problem, by name, for shrinking."""

FLAGS = ("bias", "residual", "relu")
FORMATS = ("signed", "signed_residual", "narrow", "wide", "image", "scaled")
"""Numbers of quantised problems (`r18_oracle.ops.integers.spec`)."""


@dataclass(frozen=True)
class Summand:
    """A sum of products in the outputs of another problem, as a problem of its own.

    input, weight: the indices, among the other problem's inputs and weights, of the two arrays that
    are multiplied; they are the first input and the first weight of `problem`.
    """

    problem: Problem
    input: int = 0
    weight: int = 0


class OpSpec(ABC, Generic[O]):
    """The oracle's specification of an op. Every method with a body is a default to override.

    op:          the op's class.
    algorithms:  the algorithms of rounding contracts that its kernels may declare, the plainest
                 first; `exact` is allowed for every op.
    derivations: bounds for algorithms that `r18_oracle.judge.bounds` does not derive, by name:
                 functions of (case, contract, y) that return a `Bound`.
    outputs:     formats of results that its kernels declare in place of their precision's storage.
    products:    whether its outputs are sums of products of an input and a weight (`summands`).
    indexed:     whether outputs are at other indices than their inputs, so that an impulse can
                 show an index error.
    shuffles:    whether it only moves values, so that all different ones show more than an impulse.
    """

    op: ClassVar[type[Op]]
    algorithms: ClassVar[tuple[str, ...]]
    derivations: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    outputs: ClassVar[tuple[str, ...]] = ()
    products: ClassVar[bool] = False
    indexed: ClassVar[bool] = False
    shuffles: ClassVar[bool] = False

    # -- what it computes ----------------------------------------------------------------------

    @abstractmethod
    def reference(self, op: O, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        """The result in float64 from float64 tensors (logical shapes, `op.weights()` order)."""

    def pytorch(self, op: O, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        """The result as `torch.nn.functional` computes it in the tensors' own format."""
        return self.reference(op, inputs, weights)

    def depth(self, op: O) -> int:
        """K, the number of products in each output; 1 for an op without products."""
        return 1

    def summands(self, problem: Problem) -> tuple[Summand, ...]:
        """The sums of products that each output adds up. Default: one, the problem's own."""
        return (Summand(problem),)

    # -- problems ------------------------------------------------------------------------------

    @abstractmethod
    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        """Problems near the kernel's edges.

        Each tensor holds about `most` elements at most, and a problem multiplies `macs` times at
        most.
        """

    @abstractmethod
    def corners(self) -> Iterator[Problem]:
        """Small problems on which kernels go wrong."""

    def ordinary(self, kernel: Kernel) -> Iterator[Problem]:
        """Small problems like a network's, to call a kernel on in several ways."""
        return self.corners()

    def growing(self, kernel: Kernel) -> Iterator[Problem]:
        """Small problems that are made larger until they exceed a limit of the kernel's workspace.

        See `r18_oracle.generate.rounds`.
        """
        return self.ordinary(kernel)

    def many(self) -> Iterator[Problem]:
        """More channels, outputs or samples than a CUDA grid holds; all else as small as it gets.

        See `r18_oracle.generate.sizes.BEYOND_GRID`.
        """
        yield from ()

    def many_tiles(self) -> Iterator[Problem]:
        """More tiles than a device computes at a time: each persistent block takes several."""
        yield from ()

    def vast(self) -> Iterator[Problem]:
        """Problems with more elements than 32 bits count, to check whether a kernel refuses them.

        They are too large to run. By default the first corner, with a batch that large.
        """
        problem = next(self.corners())
        shapes = tuple((BEYOND_INDEX, *shape[1:]) for shape in problem.inputs)
        yield Problem(problem.op, shapes)

    @abstractmethod
    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        """Problems in which one axis after the other has this size, and all others are small."""

    def beyond(self, choice: Kernel) -> Iterator[Problem]:
        """Further problems for a kernel that is one of several tiles."""
        yield from ()

    def room(self, kernel: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        """The limits for drawn problems; larger where the kernel takes only large ones."""
        return max_elements, max_macs

    def room_of_choice(self, choice: Kernel, max_elements: int, max_macs: int) -> tuple[int, int]:
        """The limits for problems that cross a tile's own edges."""
        return self.room(choice, max_elements, max_macs)

    def nearby(self, problem: Problem) -> Iterator[Problem]:
        """Problems to try in turn until a kernel takes one, the simplest first."""
        yield problem

    def plainer(self, problem: Problem) -> Iterator[Problem]:
        """The problem without what its op fuses, step by step, for a kernel that fuses nothing."""
        yield from ()

    def numbers(self, problem: Problem) -> Numbers:
        """The numbers that shrinking may reduce."""
        found = dict(zip("nchw", problem.inputs[0], strict=False))
        return found | flags_of(problem.op)

    def rebuild(self, op: O, numbers: Numbers) -> Problem:
        """The problem of these numbers, otherwise like `op`. Raises `ShapeError`."""
        return Problem(op, (shape_of(numbers),) * op.arity)

    # -- inputs --------------------------------------------------------------------------------

    def weights(self, problem: Problem, rng: Rng, draw: Draw, scale: float) -> Arrays:
        """Random weights; `scale` keeps the outputs as large as the inputs (He)."""
        return tuple(
            draw(spec.shape) * (scale if len(spec.shape) > 1 else 0.5)
            for spec in problem.op.weights()
        )

    def given(
        self, problem: Problem, kind: str, rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays] | None:
        """Inputs and weights of this kind for an op of bytes or integers; None for one of numbers.

        In float64, and such that the op's storage formats hold them.
        """
        return None

    def explain(self, op: O, inputs: Tensors, weights: Tensors, got: Array) -> str:
        """A likely cause of this wrong output (float64), in a sentence; empty if unknown."""
        return ""

    def exact(self, problem: Problem, algorithm: str) -> bool:
        """Whether integers of suitable size have an exact result under this algorithm."""
        return algorithm in ("sum", "winograd_f2x2", "elementwise", "exact")

    def terms(self, problem: Problem) -> int:
        """How many inputs are added up without weights; limits the size of exact integers."""
        return 1

    def variants(self, kind: str) -> int:
        """How many sets of inputs of a kind it takes to show what that kind can show."""
        return 1

    def exact_inputs(
        self, op: O, inputs: list[Array], weights: list[Array], rng: Rng, variant: int
    ) -> tuple[Arrays, Arrays]:
        """Exact integers, changed to show more of this op."""
        return tuple(inputs), tuple(weights)

    def meeting(self, problem: Problem, rng: Rng) -> tuple[Shape, Shape] | None:
        """The indices of an input and a weight whose product is in one output; None without."""
        return None

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """Normal values, changed so that large terms nearly cancel."""
        return (inputs[0] * 100.0, *inputs[1:]), weights

    def wide(
        self, problem: Problem, inputs: Arrays, weights: Arrays, rng: Rng
    ) -> tuple[Arrays, Arrays]:
        """Values over many binades, changed where the op would make nothing of them."""
        return inputs, weights

    def only_edges(
        self, op: O, inputs: Arrays, weights: Arrays, rng: Rng, variant: int, tiny: float
    ) -> tuple[Arrays, Arrays] | None:
        """Inputs full of an edge value, in place of a few scattered ones; None for the usual.

        tiny: the storage format's smallest normal number.
        """
        return None

    def flood(self, flat: Array, rng: Rng) -> None:
        """Fill parts of an input with an edge value, in place, before the others are scattered."""

    def edge_weights(self, weights: Arrays, rng: Rng) -> None:
        """Write edge values into the weights, in place."""


class SumSpec(OpSpec[O]):
    """An op whose outputs are sums of products and a few addends (bias, residual)."""

    products = True
    indexed = True

    @abstractmethod
    def sums(self, op: O, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        """The sums of products, before bias, residual and ReLU."""

    @abstractmethod
    def addends(self, op: O, inputs: Arrays, weights: Arrays) -> Arrays:
        """Bias and residual, in shapes that broadcast over the output."""

    @abstractmethod
    def window_sum(self, op: O, x: Array) -> Array:
        """The sum of the first input's elements that each output reads, in a shape that broadcasts
        over it."""

    def cancelling(self, inputs: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """Activations around 100, weights of mean zero."""
        first = weights[0]
        axes = tuple(range(1, first.ndim))
        centred = first - first.mean(axis=axes, keepdims=True)
        return (inputs[0] + 100.0, *inputs[1:]), (centred, *weights[1:])


def flags_of(op: Op) -> Numbers:
    """The flags that an op has, as numbers to shrink."""
    return {name: int(getattr(op, name)) for name in FLAGS if hasattr(op, name)}


def shape_of(numbers: Numbers) -> Shape:
    """The input shape: (N, C, H, W), or (N, F)."""
    return tuple(numbers[axis] for axis in "nchw" if axis in numbers)


def pick(rng: Rng, shape: Shape) -> Shape:
    """A random index into an array of this shape."""
    return tuple(int(rng.integers(extent)) for extent in shape)


__all__ = [
    "FLAGS",
    "FORMATS",
    "Arrays",
    "Draw",
    "Numbers",
    "OpSpec",
    "Rng",
    "SumSpec",
    "Summand",
    "Tensors",
    "flags_of",
    "pick",
    "shape_of",
]
