"""ResNet inference written by hand, many times over, and an oracle that judges any kernel.

    program = r18.compile("resnet18", "imagenet", batch=2)
    logits = program(r18.preprocess_batch(["cat.jpg", "dog.jpg"]))  # (2, 1000) float32

Importing this package loads none of its modules; each name below loads what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r18 import check as check
    from r18.backend import CompileOptions as CompileOptions
    from r18.backend.registry import get_backend as get_backend
    from r18.compiled import compile as compile
    from r18.graph.resnet import network as network
    from r18.graph.resnet import resnet18 as resnet18
    from r18.graph.resnet import resnet34 as resnet34
    from r18.graph.resnet import resnet50 as resnet50
    from r18.images.preprocess import preprocess_batch as preprocess_batch
    from r18.torch import optimize_resnet as optimize_resnet
    from r18.weights import load_weights as load_weights

__version__ = "0.1.0"

_WHERE = {
    "CompileOptions": "r18.backend",
    "compile": "r18.compiled",
    "get_backend": "r18.backend.registry",
    "load_weights": "r18.weights",
    "network": "r18.graph.resnet",
    "optimize_resnet": "r18.torch",
    "preprocess_batch": "r18.images.preprocess",
    "resnet18": "r18.graph.resnet",
    "resnet34": "r18.graph.resnet",
    "resnet50": "r18.graph.resnet",
}

__all__ = [
    "CompileOptions",
    "compile",
    "get_backend",
    "load_weights",
    "network",
    "optimize_resnet",
    "preprocess_batch",
    "resnet18",
    "resnet34",
    "resnet50",
]


_MODULES = ("check",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"r18.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'r18' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
