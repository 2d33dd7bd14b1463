"""Read a captured graph of PyTorch's into our ops: node by node, as `torch.compile` gives it to a
backend.

A node is read into an op at fusion level `none`, or not at all. A node that none of our ops
computes has a reason, in words.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from r18.errors import R18Error
from r18.graph.ops import Add, BatchNorm, Conv2d, GlobalAvgPool, Linear, MaxPool2d, Op, ReLU


class Unread(Exception):
    """Why a node that could have been ours is not."""


@dataclass(frozen=True)
class Read:
    """A node as an op: the nodes of its activations, and of its weights in the op's order."""

    op: Op
    inputs: tuple[Node, ...]
    weights: tuple[Node, ...] = ()


def read(node: Node) -> Read | None:
    """A node as an op of ours; None if none of them computes it.

    Raises `Unread` for a convolution, pooling or the like with settings that ours do not have.
    """
    reader = _READERS.get(node.target) if node.op in ("call_function", "call_method") else None
    if reader is None:
        return None
    try:
        return reader(node)
    except R18Error as error:
        raise Unread(str(error).splitlines()[0]) from None


def value(node: object) -> torch.Tensor:
    """The stand-in of a node's tensor; raises `Unread` if it is not a tensor."""
    found = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(found, torch.Tensor):
        raise Unread(f"it reads {node}, which is no tensor")
    return found


def shape(node: object) -> tuple[int, ...]:
    """A tensor's shape; raises `Unread` for one that is not known before the call."""
    found = tuple(value(node).shape)
    if not all(isinstance(extent, int) for extent in found):
        raise Unread(
            "its shape is dynamic, and kernels are chosen for a shape: compile with dynamic=False"
        )
    if 0 in found:
        raise Unread("its tensors are empty")
    return found


# -- arguments ---------------------------------------------------------------------------------


def _given(node: Node, *names: str, **defaults: Any) -> dict[str, Any]:
    """A call's arguments by name."""
    order = [*names, *defaults]
    if len(node.args) > len(order) or node.kwargs.keys() - set(order) or node.kwargs.get("out"):
        raise Unread("it is called with arguments that are not known here")
    found = {**defaults, **dict(zip(order, node.args, strict=False)), **node.kwargs}
    if any(name not in found for name in names):
        raise Unread("it is called without an argument")
    return found


def _pair(given: Any) -> tuple[int, int]:
    pair = (given, given) if isinstance(given, int) else tuple(given)
    if len(pair) == 1:
        pair = pair * 2
    if len(pair) != 2 or not all(isinstance(extent, int) for extent in pair):
        raise Unread(f"{given} is no pair of numbers")
    return pair


def _images(node: Node) -> tuple[int, ...]:
    extents = shape(node)
    if len(extents) != 4:
        raise Unread(f"it reads {len(extents)} dimensions, not images (N, C, H, W)")
    return extents


# -- operations --------------------------------------------------------------------------------


def _conv(node: Node) -> Read:
    given = _given(node, "input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1)
    _images(given["input"])
    o, c, kh, kw = shape(given["weight"])
    stride, dilation = _pair(given["stride"]), _pair(given["dilation"])
    padding = given["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":
        both = [d * (k - 1) for d, k in zip(dilation, (kh, kw), strict=True)]
        if any(amount % 2 for amount in both):
            raise Unread("padding='same' of an even kernel is more on one side than on the other")
        padding = tuple(amount // 2 for amount in both)
    bias = given["bias"]
    op = Conv2d(
        c * given["groups"],
        o,
        (kh, kw),
        stride,
        _pair(padding),
        bias=bias is not None,
        groups=given["groups"],
        dilation=dilation,
    )
    weights = (given["weight"],) if bias is None else (given["weight"], bias)
    return Read(op, (given["input"],), weights)


def _norm(node: Node) -> Read:
    given = _given(
        node,
        "input",
        "running_mean",
        "running_var",
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    )
    if given["training"]:
        raise Unread("it is in training mode, and kernels are for inference: call model.eval()")
    names = ("weight", "bias", "running_mean", "running_var")
    weights = tuple(given[name] for name in names)
    if not all(isinstance(weight, Node) for weight in weights):
        raise Unread("it has no weight and bias, or no running statistics")
    return Read(BatchNorm(_images(given["input"])[1], given["eps"]), (given["input"],), weights)


def _relu(node: Node) -> Read:
    given = _given(node, "input", inplace=False)
    return Read(ReLU(), (given["input"],))


def _add(node: Node) -> Read | None:
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, Node) for a in node.args):
        return None
    a, b = node.args
    try:
        if shape(a) != shape(b):
            return None
    except Unread:
        return None
    return Read(Add(), (a, b))  # type: ignore[arg-type]  # they are nodes


def _max_pool(node: Node) -> Read:
    given = _given(
        node,
        "input",
        "kernel_size",
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=False,
    )
    if given["return_indices"] or given["ceil_mode"] or _pair(given["dilation"]) != (1, 1):
        raise Unread("kernels of max-pooling know no indices, no ceil_mode and no dilation")
    _images(given["input"])
    size = _pair(given["kernel_size"])
    stride = given["stride"]
    stride = size if stride is None or stride == [] else _pair(stride)
    return Read(MaxPool2d(size, stride, _pair(given["padding"])), (given["input"],))


def _adaptive(node: Node) -> Read:
    given = _given(node, "input", "output_size")
    _images(given["input"])
    if _pair(given["output_size"]) != (1, 1):
        raise Unread("kernels of pooling by averages average whole images: output_size=1")
    return Read(GlobalAvgPool(), (given["input"],))


def _mean(node: Node) -> Read | None:
    given = _given(node, "input", dim=None, keepdim=False, dtype=None)
    dims = given["dim"]
    if not isinstance(dims, (tuple, list)) or given["dtype"] is not None:
        return None
    if len(value(given["input"]).shape) != 4 or {dim % 4 for dim in dims} != {2, 3}:
        return None
    shape(given["input"])
    return Read(GlobalAvgPool(), (given["input"],))


def _linear(node: Node) -> Read:
    given = _given(node, "input", "weight", bias=None)
    if (count := len(shape(given["input"]))) != 2:
        raise Unread(f"it reads {count} dimensions, not (N, features)")
    out, features = shape(given["weight"])
    bias = given["bias"]
    weights = (given["weight"],) if bias is None else (given["weight"], bias)
    return Read(Linear(features, out), (given["input"],), weights)


_READERS: dict[Any, Callable[[Node], Read | None]] = {
    torch.conv2d: _conv,
    F.batch_norm: _norm,
    torch.batch_norm: lambda node: None,  # with other arguments; modules do not call it
    F.relu: _relu,
    F.relu_: _relu,
    torch.relu: _relu,
    torch.relu_: _relu,
    "relu": _relu,
    "relu_": _relu,
    operator.add: _add,
    operator.iadd: _add,
    torch.add: _add,
    "add": _add,
    "add_": _add,
    F.max_pool2d: _max_pool,
    torch.max_pool2d: _max_pool,
    F.adaptive_avg_pool2d: _adaptive,
    torch.mean: _mean,
    "mean": _mean,
    F.linear: _linear,
}
"""Readers by the callee of a node: a function, or a method by its name."""


def flattened(node: Node) -> Node | None:
    """The node that a node flattens from (N, C, 1, 1) to (N, C), or None."""
    if node.target not in (torch.flatten, "flatten", "reshape", "view", "squeeze", torch.squeeze):
        return None
    source = node.args[0] if node.args else None
    try:
        before, after = shape(source), shape(node)
    except Unread:
        return None
    same = len(before) == 4 and before[2:] == (1, 1) and after == before[:2]
    return source if same and isinstance(source, Node) else None


# -- changes in place --------------------------------------------------------------------------


def mutates(node: Node) -> bool:
    """Whether a node may write to a tensor that existed before it, as far as can be told."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if target in _IN_PLACE or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    name = getattr(target, "__name__", "")
    flags = (*node.args[1:], node.kwargs.get("inplace"))
    return (
        name.endswith("_")
        or node.kwargs.get("out") is not None
        or any(flag is True for flag in flags)
        or node.op != "call_function"
    )


_IN_PLACE: frozenset[Any] = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "setitem", "delitem"),
    )
)


def undisturbed(nodes: Sequence[Node], position: dict[Node, int], order: Sequence[Node]) -> bool:
    """Whether nodes may be computed as one, where the last is: nothing between them, and none of
    them, changes a tensor that another node reads."""
    inside = set(nodes)
    first, last = min(map(position.__getitem__, nodes)), max(map(position.__getitem__, nodes))
    if any(mutates(node) for node in order[first : last + 1] if node not in inside):
        return False
    return all(_changes_its_own(node, inside) for node in nodes if mutates(node))


def _changes_its_own(node: Node, inside: Iterable[Node]) -> bool:
    changed = node.args[0] if node.args else None
    return isinstance(changed, Node) and changed in inside and list(changed.users) == [node]
