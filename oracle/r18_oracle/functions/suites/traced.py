"""Trace a PyTorch module to the one operator that it computes, if that has an equivalent here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from r18_oracle.functions.suites.adapted import pair


class NotJudged(Exception):
    """A module is not one operator that is judged here; the message says what it is instead."""


@dataclass(frozen=True)
class Traced:
    """A module's operator.

    like:     its name (`r18_oracle.functions.likes`).
    settings: what it is called with, pairs where it has two axes, and its parameters' sizes.
    state:    names in the module's state dict of the operator's weights, in the order in which the
              operator takes them after its inputs; without a bias that the module has not.
    inputs:   for each of the operator's inputs, which argument of `forward` it is, and whether that
              is transposed first.
    """

    like: str
    settings: dict[str, Any]
    state: tuple[str, ...]
    inputs: tuple[tuple[int, bool], ...]


Found = tuple[str, dict[str, Any], tuple[str, ...]]


def _conv2d(m: Any) -> Found:
    if m.groups != 1 or pair(m.dilation) != (1, 1):
        raise NotJudged("a convolution with groups or dilation")
    if isinstance(m.padding, str) or m.padding_mode != "zeros":
        raise NotJudged(f"a convolution with padding {m.padding!r} of {m.padding_mode}")
    settings = {
        "weight": tuple(m.weight.shape),
        "bias": m.bias is not None,
        "stride": pair(m.stride),
        "padding": pair(m.padding),
    }
    return "conv2d", settings, ("weight", *(("bias",) if m.bias is not None else ()))


def _linear(m: Any) -> Found:
    if m.bias is None:
        raise NotJudged("a linear layer without a bias")
    return "linear", {"weight": tuple(m.weight.shape)}, ("weight", "bias")


def _batch_norm(m: Any) -> Found:
    if not m.affine or m.running_mean is None:
        raise NotJudged("a BatchNorm2d without weights or running statistics")
    settings = {"channels": m.num_features, "eps": m.eps}
    return "batch_norm", settings, ("running_mean", "running_var", "weight", "bias")


def _max_pool2d(m: Any) -> Found:
    if pair(m.dilation) != (1, 1) or m.ceil_mode or m.return_indices:
        raise NotJudged("a pooling with dilation, ceil_mode or indices")
    return "max_pool2d", {k: pair(getattr(m, k)) for k in ("kernel_size", "stride", "padding")}, ()


def _average(m: Any) -> Found:
    if pair(m.output_size) != (1, 1):
        raise NotJudged(f"an average of output size {m.output_size}")
    return "adaptive_avg_pool2d", {}, ()


def _softmax(m: Any) -> Found:
    if m.dim not in (1, -1):
        raise NotJudged(f"a softmax over axis {m.dim}")
    return "softmax", {}, ()


MODULES: dict[str, Callable[[Any], Found]] = {
    "Conv2d": _conv2d,
    "Linear": _linear,
    "BatchNorm2d": _batch_norm,
    "MaxPool2d": _max_pool2d,
    "AdaptiveAvgPool2d": _average,
    "Softmax": _softmax,
    "ReLU": lambda m: ("relu", {}, ()),
}
"""Operators by the name of the class in `torch.nn`."""
FUNCTIONS = {
    "relu": ("relu", 1),
    "relu_": ("relu", 1),
    "matmul": ("matmul", 2),
    "mm": ("matmul", 2),
    "add": ("add", 2),
    "softmax": ("softmax", 1),
}
"""Operators and their counts of inputs, by the name of a function or a tensor's method."""


def traced(model: Any) -> Traced:
    """The operator of a `torch.nn.Module`. Raises `NotJudged`."""
    import torch
    from torch import fx

    tracer = cast(Any, fx)  # it has no types
    try:
        graph = tracer.symbolic_trace(model).graph
    except Exception as error:  # whatever a model does that torch.fx cannot follow
        raise NotJudged(f"a module that torch.fx does not trace ({error})") from error
    given: dict[Any, tuple[int, bool]] = {}
    nodes, returned = [], None
    for node in graph.nodes:
        if node.op == "placeholder":
            given[node] = (len(given), False)
        elif node.op == "output":
            returned = node.args[0]
        elif (source := _transposed(node)) in given:
            given[node] = (given[source][0], not given[source][1])
        else:
            nodes.append(node)
    if len(nodes) != 1 or returned is not nodes[0]:
        titles = ", ".join(_title(model, node) for node in nodes) or "no operator"
        raise NotJudged(f"{titles}, where one operator is judged at a time")
    (node,) = nodes
    if node.op == "call_module":
        module = model.get_submodule(node.target)
        how = MODULES.get(type(module).__name__)
        if how is None or not isinstance(module, getattr(torch.nn, type(module).__name__)):
            raise NotJudged(_title(model, node))
        like, settings, state = how(module)
        count = 1
    else:
        like, count = _function(node)
        settings, state = {}, ()
    inputs = node.args[:count]
    if len(inputs) < count or any(value not in given for value in inputs):
        raise NotJudged(f"{like} of something that is no argument of forward")
    names = tuple(f"{node.target}.{name}" for name in state)
    return Traced(like, settings, names, tuple(given[value] for value in inputs))


def _function(node: Any) -> tuple[str, int]:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    if node.op not in ("call_function", "call_method") or name not in FUNCTIONS:
        raise NotJudged(name)
    like, count = FUNCTIONS[name]
    left = dict(node.kwargs) | dict(enumerate(node.args[count:]))
    left.pop("inplace", None)
    if like == "softmax":
        dim = left.pop("dim", left.pop(0, None))
        if dim not in (1, -1):
            raise NotJudged(f"a softmax over axis {dim}")
        left.pop("_stacklevel", None)  # of torch.nn.functional.softmax, for its warnings
        left = {name: value for name, value in left.items() if value is not None}
    if left and not (like == "relu" and left == {0: False}):
        raise NotJudged(f"{name} with {', '.join(map(str, left.values()))}")
    return like, count


def _transposed(node: Any) -> Any:
    """The node that a node transposes, or None."""
    if node.op == "call_function" and node.target is getattr and node.args[1:] in (("T",), ("mT",)):
        return node.args[0]
    if node.op == "call_method" and node.target == "t":
        return node.args[0]
    swaps = node.target == "transpose" or getattr(node.target, "__name__", "") == "transpose"
    if swaps and {*node.args[1:]} in ({0, 1}, {-1, -2}):
        return node.args[0]
    return None


def _title(model: Any, node: Any) -> str:
    if node.op == "call_module":
        return type(model.get_submodule(node.target)).__name__
    return node.target if isinstance(node.target, str) else str(node.target.__name__)


def wanted(like: str, shapes: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that a module traced for a problem must have. shapes: as the operator's."""
    if like == "conv2d":
        return {
            "weight": tuple(shapes[1]),
            "bias": shapes[2] is not None,
            **{name: pair(settings[name]) for name in ("stride", "padding")},
        }
    if like == "linear":
        return {"weight": tuple(shapes[1])}
    if like == "batch_norm":
        return {"channels": shapes[0][1], "eps": settings["eps"]}
    if like == "max_pool2d":
        return {name: pair(settings[name]) for name in ("kernel_size", "stride", "padding")}
    return {}


__all__ = ["MODULES", "NotJudged", "Traced", "traced", "wanted"]
