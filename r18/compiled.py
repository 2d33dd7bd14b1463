"""From names to a program in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from r18.backend import Backend, CompileOptions, Program
from r18.backend.registry import get_backend
from r18.errors import UsageError, unknown
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.weights import load_weights
from r18.weights.precisions import in_precision


def compile(
    schedule: str | Schedule = "resnet18",
    weights: str | os.PathLike[str] | Mapping[str, Any] = "imagenet",
    backend: str | Backend | None = None,
    **options: Any,
) -> Program:
    """A network on a backend, ready to run: from (N, 3, H, W) float32 images to (N, 1000) logits.

    schedule: a name such as `resnet18`, or a schedule at level `none`.
    weights:  a source as `load_weights` takes it, or tensors by torchvision's names, such as a
              model's `state_dict()`. int8 needs weights with a quantisation (`r18 quantize`).
    backend:  a name as `get_backend` takes it; None for `R18_BACKEND`, else the first that can run.
    options:  of `CompileOptions`: batch, precision, fusion, taps, ...

    Raises `R18Error`: `UnknownName` with the nearest match, `WeightsError`, `BackendUnavailable`
    with cause and remedy, `NoKernel`, `UsageError` for an option that does not exist.
    """
    known = [field.name for field in fields(CompileOptions)]
    for name in options:
        if name not in known:
            raise unknown("option", name, known, error=UsageError)
    asked = CompileOptions(**options)
    if not isinstance(schedule, Schedule):
        schedule = network(schedule)
    if isinstance(weights, str | os.PathLike):
        weights = load_weights(os.fspath(weights), schedule, asked.precision)
    if not isinstance(backend, Backend):
        backend = get_backend(backend)
    return backend.compile(*in_precision(schedule, weights, asked), asked)
