"""Everything but the weights that a model's forward pass depends on, and whether it has changed.

A fused layer calls none of the modules that it replaces. So whatever can change what they compute
is watched: the modules and their classes, settings, hooks and containers, and the functions that a
call runs, on the instance and on the class.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

_CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
"""The methods behind a call of any module."""

_FORWARD = ("forward", "_forward_impl", "_conv_forward", "_check_input_dim", "__iter__")
"""The methods of torchvision's and PyTorch's modules that run in a forward pass."""

_LIKELY = ("forward", "_forward_impl", "_conv_forward")
"""The methods that wrappers replace on an instance."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of dictionaries, and what was there. Looking at them is on the way of every call."""

    dictionaries: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: list[Any]

    @classmethod
    def of(cls, places: Iterable[tuple[dict[str, Any], str]]) -> Entries:
        dictionaries, names = zip(*places, strict=True)
        return cls(dictionaries, names, list(map(dict.get, dictionaries, names)))

    @property
    def stand(self) -> bool:
        """Whether each is the same object; an equal one may change apart from it."""
        return all(map(is_, map(dict.get, self.dictionaries, self.names), self.values))

    @property
    def equal(self) -> bool:
        """Whether each is equal: for numbers and tuples, which torch.compile makes again."""
        return self.now() == self.values

    def now(self) -> list[Any]:
        return list(map(dict.get, self.dictionaries, self.names))


@dataclass(frozen=True, eq=False)
class Watch:
    """A model's modules at examination.

    settings:   numbers and tuples that a forward pass reads.
    places:     their containers and children, and what wrappers would replace.
    attributes: of each module, its dictionary; with how many entries each had.
    hooks:      where each keeps its hooks.
    children:   the containers of children, and the order of those.
    methods:    the functions of their classes that a forward pass runs.
    """

    modules: tuple[nn.Module, ...]
    kinds: list[type[nn.Module]]
    settings: Entries
    places: Entries
    attributes: tuple[dict[str, Any], ...]
    sizes: list[int]
    hooks: tuple[tuple[dict[str, Any], ...], tuple[str, ...]]
    children: tuple[tuple[dict[str, Any], ...], list[tuple[str, ...]]]
    methods: tuple[tuple[type[nn.Module], ...], tuple[str, ...], list[Any]]

    @classmethod
    def of(cls, model: nn.Module, settings: Iterable[tuple[dict[str, Any], str]]) -> Watch:
        """Everything in the model, and these settings of its modules."""
        modules = tuple(model.modules())
        attributes = tuple(map(vars, modules))
        kinds = list(map(type, modules))
        methods = [(kind, name) for kind in dict.fromkeys(kinds) for name in _methods(kind)]
        owners, names = zip(*methods, strict=True)
        parents = tuple(module._modules for module in modules if module._modules)
        hooked, hooks = zip(
            *((found, name) for found in attributes for name in _HOOKS), strict=True
        )
        return cls(
            modules,
            kinds,
            Entries.of(settings),
            Entries.of(_places(modules)),
            attributes,
            list(map(len, attributes)),
            (hooked, hooks),
            (parents, list(map(tuple, parents))),
            (owners, names, list(map(getattr, owners, names))),
        )

    @property
    def stands(self) -> bool:
        """Whether all is as it was, and without hooks."""
        attributes, hooks = self.hooks
        parents, order = self.children
        return not (
            any(map(dict.get, attributes, hooks))
            or global_hooks()
            or list(map(type, self.modules)) != self.kinds
            or list(map(len, self.attributes)) != self.sizes
            or list(map(tuple, parents)) != order
            or not self.settings.equal
            or not self.places.stand
            or not self._methods_stand()
        )

    def _methods_stand(self) -> bool:
        if torch.compiler.is_compiling():  # which guards the functions that it has traced
            return True
        owners, names, functions = self.methods
        return all(map(is_, map(getattr, owners, names), functions))


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    for module in modules:
        attributes = vars(module)
        for container in ("_parameters", "_buffers", "_modules"):
            if attributes[container]:
                yield attributes, container
        for name in module._modules:
            yield module._modules, name
        for name in (*_LIKELY, "downsample"):  # a block without one has None there
            if hasattr(type(module), name) or name in attributes:
                yield attributes, name
        for name in attributes.keys() - set(_LIKELY):
            if callable(getattr(type(module), name, None)) or name == "_compiled_call_impl":
                yield attributes, name  # `hidden_method` accepted its value


def global_hooks() -> bool:
    """Whether hooks of every module are registered."""
    return bool(torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks)


def hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


# -- methods -----------------------------------------------------------------------------------


def _methods(kind: type[nn.Module]) -> Iterator[str]:
    return (name for name in (*_CALLED, *_FORWARD) if hasattr(kind, name))


def other_method(kind: type[nn.Module], known: type[nn.Module]) -> str | None:
    """The name of a method that a forward pass runs and that a class does not have from `known`.

    A method of PyTorch's own class counts as another one if it was patched: it was then defined in
    another Python module.
    """
    for name in _methods(kind):
        function = getattr(kind, name)
        if function is not getattr(known, name, None) or not _original(known, name):
            return name
    return None


def _original(kind: type[nn.Module], name: str) -> bool:
    """Whether a class's method was defined where the class was."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    namespace = getattr(getattr(owner, name), "__globals__", None)
    return owner is object or namespace is vars(sys.modules[owner.__module__])


def hidden_method(module: nn.Module) -> str | None:
    """The name of a method of its class that an attribute of the module hides.

    The class's own method, bound to the module, is fine there: wrappers leave it when they are
    removed. So is what `module.compile()` sets.
    """
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":
            compiled: Any = getattr(value, "_torchdynamo_orig_callable", None)
            if value is not None and inspect.unwrap(compiled) != module._call_impl:
                return name
            continue
        method = getattr(type(module), name, None)
        if callable(method) and value != MethodType(method, module):
            return name
    return None


def hidden_member(module: nn.Module) -> str | None:
    """The name of a child, parameter or buffer that an attribute of the module or class hides."""
    members = (*module._modules, *module._parameters, *module._buffers)
    for name in members:
        if name in vars(module) or hasattr(type(module), name):
            return name
    return None
