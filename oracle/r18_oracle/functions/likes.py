"""The operators that a function may be like, and the arguments that each one is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r18.backend import Array
from r18.errors import UsageError, show, unknown
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Linear,
    MatMul,
    MaxPool2d,
    Op,
    Problem,
    ReLU,
    Shape,
    Softmax,
)

REQUIRED = object()
"""The default of a setting that has none."""


@dataclass(frozen=True)
class Setting:
    """An argument that is not an array. default: what the operator takes where it is not given."""

    name: str
    value: Any
    default: Any = REQUIRED

    @property
    def is_default(self) -> bool:
        return self.default is not REQUIRED and self.value == self.default


@dataclass(frozen=True)
class Call:
    """The arguments of one call.

    arrays:   names, in the operator's order, and where each array comes from: an index into the
              problem's inputs followed by its weights; None for an array that is not given.
    settings: the other arguments, after them.
    """

    arrays: tuple[tuple[str, int | None], ...]
    settings: tuple[Setting, ...] = ()

    @property
    def names(self) -> str:
        """The arguments as the operator names them: `(input, weight, bias, stride, padding)`."""
        names = (*(name for name, _ in self.arrays), *(one.name for one in self.settings))
        return f"({', '.join(names)})"


@dataclass(frozen=True)
class Like:
    """An operator.

    name, title: `conv2d`, and its full name in PyTorch.
    op:          its op, as a class of `r18.graph.ops`.
    call:        the arguments for a problem of that op.
    algorithms:  the algorithms of rounding contracts that are tried, the sharpest first.
    refuses:     problems of the op that the operator does not express, and why.
    transposes:  it takes (I, O) where the op's weight is (O, I).
    keeps:       axes of length one that its result has after those of the op's output.
    """

    name: str
    title: str
    op: type[Op]
    call: Callable[[Any], Call]
    algorithms: tuple[str, ...]
    refuses: Callable[[Problem], str | None] = lambda problem: None
    transposes: bool = False
    keeps: int = 0

    def weights(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Weights as the operator takes them, of those in `op.weights()` order and shape."""
        return tuple(a.T for a in arrays) if self.transposes else arrays

    def result(self, problem: Problem) -> Shape:
        """The shape of the operator's result."""
        return (*problem.output, *(1,) * self.keeps)

    @property
    def sums_products(self) -> bool:
        """Whether its outputs are sums of products, whose arithmetic probes can find."""
        return self.algorithms == ("sum",)


def _pair(extents: tuple[int, int]) -> int | tuple[int, int]:
    """As users write it: one number where both axes have the same."""
    return extents[0] if extents[0] == extents[1] else extents


def _conv2d(op: Conv2d) -> Call:
    arrays = (("input", 0), ("weight", 1), ("bias", 2 if op.bias else None))
    stride, padding = _pair(op.stride), _pair(op.padding)
    return Call(arrays, (Setting("stride", stride, 1), Setting("padding", padding, 0)))


def _batch_norm(op: BatchNorm) -> Call:
    arrays = ("input", 0), ("running_mean", 3), ("running_var", 4), ("weight", 1), ("bias", 2)
    training, momentum = Setting("training", False, False), Setting("momentum", 0.1, 0.1)
    return Call(arrays, (training, momentum, Setting("eps", op.eps, 1e-5)))


def _max_pool2d(op: MaxPool2d) -> Call:
    size, stride = _pair(op.kernel_size), _pair(op.stride)
    settings = Setting("kernel_size", size), Setting("stride", stride, size)
    return Call((("input", 0),), (*settings, Setting("padding", _pair(op.padding), 0)))


def _fuses(problem: Problem) -> str | None:
    if getattr(problem.op, "residual", False) or getattr(problem.op, "relu", False):
        return "fuses no residual and no ReLU"
    return None


def _of_arrays(*names: str) -> Callable[[Op], Call]:
    return lambda op: Call(tuple((name, index) for index, name in enumerate(names)))


FUNCTIONAL = "torch.nn.functional"
LIKES: dict[str, Like] = {
    like.name: like
    for like in (
        Like("conv2d", f"{FUNCTIONAL}.conv2d", Conv2d, _conv2d, ("sum",), _fuses),
        Like(
            *("linear", f"{FUNCTIONAL}.linear", Linear),
            *(_of_arrays("input", "weight", "bias"), ("sum",)),
        ),
        Like(
            *("matmul", "torch.matmul", MatMul, _of_arrays("input", "other"), ("sum",)),
            transposes=True,
        ),
        Like(
            *("batch_norm", f"{FUNCTIONAL}.batch_norm", BatchNorm, _batch_norm),
            ("batchnorm", "scale_shift"),
        ),
        Like("relu", f"{FUNCTIONAL}.relu", ReLU, _of_arrays("input"), ("exact",)),
        Like("add", "torch.add", Add, _of_arrays("input", "other"), ("elementwise",), _fuses),
        Like("max_pool2d", f"{FUNCTIONAL}.max_pool2d", MaxPool2d, _max_pool2d, ("exact",)),
        Like(
            *("adaptive_avg_pool2d", f"{FUNCTIONAL}.adaptive_avg_pool2d", GlobalAvgPool),
            lambda op: Call((("input", 0),), (Setting("output_size", 1, 1),)),
            ("mean",),
            keeps=2,
        ),
        Like(
            *("softmax", f"{FUNCTIONAL}.softmax", Softmax),
            lambda op: Call((("input", 0),), (Setting("dim", 1, 1),)),
            ("softmax",),
        ),
    )
}
"""The operators by name."""


def like_of(asked: object) -> Like:
    """The operator that a name or a function means: `conv2d`, `F.relu`, `torch.add`.

    Raises `UnknownName` with the nearest, `UsageError` for anything else.
    """
    name = asked if isinstance(asked, str) else getattr(asked, "__name__", None)
    if not isinstance(name, str):
        raise UsageError(f"like= takes one of PyTorch's operators or its name, got {show(asked)}")
    last = name.rpartition(".")[2]
    if last not in LIKES:
        raise unknown("operator to be like", name, [like.title for like in LIKES.values()])
    return LIKES[last]


__all__ = ["LIKES", "REQUIRED", "Call", "Like", "Setting", "like_of"]
