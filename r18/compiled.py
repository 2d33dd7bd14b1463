"""From names to a program in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r18.backend import Array, Backend, CompileOptions, Program
from r18.backend.registry import get_backend
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.weights import load_weights


def compile(
    schedule: str | Schedule = "resnet18",
    weights: str | Mapping[str, Array] = "imagenet",
    backend: str | Backend | None = None,
    **options: Any,
) -> Program:
    """A network on a backend, ready to run: from (N, 3, H, W) float32 images to (N, 1000) logits.

    schedule: a name such as `resnet18`, or a schedule at level `none`.
    weights:  a source as `load_weights` takes it, or tensors by torchvision's names.
    backend:  a name as `get_backend` takes it; None for `R18_BACKEND`, else the first that can run.
    options:  of `CompileOptions`: batch, precision, fusion, taps, ...

    Raises `R18Error`: `UnknownName` with the nearest match, `WeightsError`, `BackendUnavailable`
    with cause and remedy, `NoKernel`.
    """
    if isinstance(schedule, str):
        schedule = network(schedule)
    if isinstance(weights, str):
        weights = load_weights(weights, schedule)
    if backend is None or isinstance(backend, str):
        backend = get_backend(backend)
    return backend.compile(schedule, weights, CompileOptions(**options))
