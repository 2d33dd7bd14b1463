"""KernelBench: a module `ModelNew` that must compute what `Model` does.

A problem's file has `Model`, `get_inputs` and `get_init_inputs`, the arguments of its constructor.
A generated file has `ModelNew`, with the same constructor; it may hold `Model` too. The suite makes
both with the same random seed, so that they have the same weights
(src/kernelbench/eval.py in github.com/ScalingIntelligence/KernelBench).

Here `ModelNew` is made for each problem, with the arguments of the constructor that give `Model`
the problem's settings. It gets the problem's weights and is in evaluation mode.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from types import ModuleType
from typing import Any

from r18.errors import UsageError
from r18_oracle.functions.suites.adapted import Adapted, pair
from r18_oracle.functions.suites.traced import NotJudged, Traced, traced, wanted

NEW, OLD, INIT = "ModelNew", "Model", "get_init_inputs"
KEPT = 64
"""Modules that are kept, with the weights that they were made with."""
SYNONYMS = {
    "in_features": ("input_size", "in_dim", "input_dim"),
    "out_features": ("output_size", "out_dim", "output_dim", "hidden_size"),
    "num_features": ("features", "channels", "num_channels"),
}


def is_problem(module: ModuleType) -> bool:
    """Whether a module has the `Model` of a problem."""
    return inspect.isclass(getattr(module, OLD, None)) and callable(getattr(module, INIT, None))


def adapted(reference: ModuleType, new: type) -> Adapted:
    """`ModelNew` as a function of its operator's arrays.

    Raises `UsageError` where `Model` is not one operator that is judged here.
    """
    problem = _Problem(reference, new)
    return Adapted(problem.traced.like, problem, problem.refuses)


class _Problem:
    """A pair of modules, and those that were made of them.

    One is kept for each set of constructor's arguments and weights, as a user keeps a model: what
    it remembers from one call to the next is then seen.
    """

    def __init__(self, reference: ModuleType, new: type) -> None:
        self.model: type = getattr(reference, OLD)
        self.new = new
        self.given = list(getattr(reference, INIT)())
        self._made: OrderedDict[Any, Any] = OrderedDict()
        self._refused: dict[Any, str | None] = {}
        self._names: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._lock = threading.RLock()
        try:
            self.traced: Traced = traced(_shaped(self.model, self.given).eval())
        except NotJudged as error:
            raise UsageError(
                f"the Model of {reference.__name__} is {error}; judged are single operators: "
                "Conv2d, Linear, BatchNorm2d, MaxPool2d, AdaptiveAvgPool2d(1), ReLU, matmul, "
                "softmax, add"
            ) from error

    def __call__(self, *arrays: Any, **settings: Any) -> Any:
        inputs, weights = self._apart(arrays)
        shapes = tuple(None if a is None else tuple(a.shape) for a in arrays)
        if (reason := self.refuses(*shapes, **settings)) is not None:
            raise ValueError(reason)
        with self._lock:
            module = self._module(shapes, settings, weights, inputs[0])
        forward: list[Any] = [None] * len(inputs)
        for array, (position, is_transposed) in zip(inputs, self.traced.inputs, strict=True):
            forward[position] = array.T.contiguous() if is_transposed else array
        return module(*forward)

    def refuses(self, *shapes: Any, **settings: Any) -> str | None:
        """Why the modules cannot be made for a problem."""
        key = self._key(shapes, settings)
        with self._lock:
            if key not in self._refused:
                self._refused[key] = self._why_not(shapes, settings)
            return self._refused[key]

    def _why_not(self, shapes: tuple[Any, ...], settings: dict[str, Any]) -> str | None:
        arguments = self._arguments(shapes, settings)
        try:
            model = _shaped(self.model, arguments)
            made = traced(model.eval())
        except Exception as error:  # a constructor's own, of arguments that it was not written for
            return f"Model cannot be made with {_listed(arguments)}: {error}"
        asked = wanted(made.like, shapes, settings)
        if differs := [name for name, value in asked.items() if made.settings.get(name) != value]:
            return f"Model cannot be made with {differs[0]} {asked[differs[0]]}"
        if made.state:
            self._names[self._key(shapes, settings)] = made.state, tuple(_state(model))
            return _unlike(made.state, model, _shaped(self.new, arguments))
        return None

    def _apart(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Inputs and weights; a bias that is not there is left out."""
        count = len(self.traced.inputs)
        return arrays[:count], tuple(array for array in arrays[count:] if array is not None)

    def _key(self, shapes: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        weights = tuple(shapes[len(self.traced.inputs) :])
        channels = shapes[0][1] if self.traced.like == "batch_norm" else 0
        return channels, weights, tuple(sorted(settings.items()))

    def _module(
        self, shapes: tuple[Any, ...], settings: dict[str, Any], weights: tuple[Any, ...], x: Any
    ) -> Any:
        import torch

        values = tuple(w.detach().cpu().view(torch.uint8).numpy().tobytes() for w in weights)
        key = self._key(shapes, settings), values, x.dtype, str(x.device)
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        module = self.new(*self._arguments(shapes, settings))
        if self.traced.state:
            names, order = self._names[self._key(shapes, settings)]
            named = dict(zip(names, weights, strict=True))
            _load(module, {name: named[name] for name in order})
        self._made[key] = module.to(device=x.device, dtype=x.dtype).eval()
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[key]

    def _arguments(self, shapes: tuple[Any, ...], settings: dict[str, Any]) -> list[Any]:
        """The constructor's arguments: a problem's settings by name, the file's own for other
        names."""
        meant = _meant(self.traced.like, shapes, settings)
        for name, others in SYNONYMS.items():
            if name in meant:
                meant |= dict.fromkeys(others, meant[name])
        arguments = []
        for index, parameter in enumerate(inspect.signature(self.model).parameters.values()):
            if parameter.name in meant:
                arguments.append(meant[parameter.name])
            elif index < len(self.given):
                arguments.append(self.given[index])
            elif parameter.default is not parameter.empty:
                arguments.append(parameter.default)
        return arguments


def _meant(like: str, shapes: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """Constructor's arguments by the names that `torch.nn` has for them."""
    if like == "conv2d":
        window = shapes[1][2:]
        return {
            "in_channels": shapes[1][1],
            "out_channels": shapes[1][0],
            "kernel_size": _short(window),
            "bias": shapes[2] is not None,
            **{name: _short(pair(settings[name])) for name in ("stride", "padding")},
        }
    if like == "linear":
        return {"in_features": shapes[1][1], "out_features": shapes[1][0]}
    if like == "batch_norm":
        return {"num_features": shapes[0][1], "eps": settings["eps"]}
    if like == "max_pool2d":
        return {k: _short(pair(settings[k])) for k in ("kernel_size", "stride", "padding")}
    return {}


def _shaped(made: type, arguments: list[Any]) -> Any:
    """A module whose weights have shapes and no values, since drawing them takes seconds for the
    largest problems; with values if its constructor reads them."""
    import torch

    try:
        with torch.device("meta"):
            return made(*arguments)
    except Exception:  # raised again by the second try, if the arguments are wrong
        return made(*arguments)


def _short(extents: Any) -> Any:
    """One number for a square; models that make a pair of it take no other."""
    return extents[0] if extents[0] == extents[1] else tuple(extents)


def _listed(arguments: list[Any]) -> str:
    return ", ".join(map(str, arguments)) or "no arguments"


def _state(module: Any) -> dict[str, Any]:
    """A module's weights without the count of batches, which no kernel for inference reads."""
    found = module.state_dict().items()
    return {name: value for name, value in found if not name.endswith("num_batches_tracked")}


def _unlike(names: tuple[str, ...], model: Any, new: Any) -> str | None:
    """Why the weights of one cannot be given to the other, or None."""
    ours, theirs = _state(model), _state(new)
    if ours.keys() != set(names):
        return f"Model has other weights than its operator's: {', '.join(ours.keys() - set(names))}"
    found = {name: tuple(value.shape) for name, value in theirs.items()}
    if found == {name: tuple(value.shape) for name, value in ours.items()}:
        return None
    shapes = [tuple(ours[name].shape) for name in ours]
    if shapes == list(found.values()):
        return None
    return f"ModelNew has weights of shapes {[*found.values()]}, where Model has {shapes}"


def _load(module: Any, state: dict[str, Any]) -> None:
    """Give a module the weights of another: by name, or in order where it has other names."""
    own = _state(module)
    if own.keys() != state.keys():
        state = dict(zip(own, state.values(), strict=True))
    for name, value in own.items():
        value.copy_(state[name])


__all__ = ["NEW", "adapted", "is_problem"]
