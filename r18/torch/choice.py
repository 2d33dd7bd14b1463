"""Choose the backend for a model: one that runs where the model is, and has the kernels."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from r18.backend import Backend, CompileOptions
from r18.backend.registry import VARIABLE, get_backend, installed
from r18.errors import BackendUnavailable, NoKernel, R18Error
from r18.graph.ops import Add, Conv2d, Layout, Op
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantize import quantized
from r18.graph.resnet import FAMILY, ResNet
from r18.runtime.plan import choose_kernel, fastest_first, make_plan
from r18.torch.storage import check_adopts

ONLY = FAMILY["resnet18"]
LEVELS = ("add_relu", "conv_bn_relu", "all")
"""The values of `fuse`."""

_OPERATORS: dict[str, tuple[type[Op], ...]] = {
    "add_relu": (Add,),
    "conv_bn_relu": (Add, Conv2d),
}
"""The ops that are computed by the backend, where it does not compute all of them."""


@dataclass(frozen=True)
class Choice:
    """The backend that computes, by name.

    layout: at level `conv_bn_relu`, the layout of every convolution's output: that of most kernels
            that the backend prefers, since a kernel that is fast in one layout is slow in the
            other. It does not depend on the images.
    """

    backend: str
    precision: str
    layout: Layout | None = None


def choose(
    asked: str | None,
    kind: str,
    level: str,
    precision: str,
    bits: int = 8,
    network: ResNet = ONLY,
) -> Choice:
    """The backend for a model, which is that network, on a kind of device ("cpu", "cuda").

    asked: a name, `module:attr` or "auto"; None: `R18_BACKEND`, else "auto". A name is taken or is
           an error; "auto" takes the first in its order that can.
    bits:  of weights in int8.
    Raises as `optimize_resnet18` says.
    """
    name = asked or os.environ.get(VARIABLE) or "auto"
    if name != "auto":
        try:
            return _checked(get_backend(name), name, kind, level, precision, bits, network)
        except NoKernel as error:
            if precision != INT8.name:
                raise
            raise NoKernel(f"{error}\n  {_with_integers(level, bits, network)}") from None
    causes: list[str] = []
    for candidate in installed():
        try:
            backend = get_backend(candidate)
            if backend.probe().simulated:
                raise BackendUnavailable(candidate, "it is a simulator, which auto never takes")
            return _checked(backend, candidate, kind, level, precision, bits, network)
        except (BackendUnavailable, NoKernel) as error:
            causes.append(f"{candidate}: {_cause(error)}")
    known = [_with_integers(level, bits, network)] if precision == INT8.name else []
    raise BackendUnavailable(
        "auto",
        f"none computes a drop-in at level {level} in {precision} on {kind}",
        "\n  ".join([*causes, *known, "`r18 backends` shows what each one needs."]),
    )


def choose_layers(asked: str | None, kind: str, precision: str) -> str:
    """The backend of single layers of any network, on a kind of device; `asked` as for `choose`.

    A backend that has kernels in that precision is taken; whether one of them takes a layer is seen
    layer by layer. Raises `BackendUnavailable`.
    """
    name = asked or os.environ.get(VARIABLE) or "auto"
    if name != "auto":
        _computes(get_backend(name), name, kind)
        return name
    causes: list[str] = []
    for candidate in installed():
        try:
            backend = get_backend(candidate)
            if backend.probe().simulated:
                raise BackendUnavailable(candidate, "it is a simulator, which auto never takes")
            _computes(backend, candidate, kind)
            if any(kernel.precision.name == precision for kernel in backend.kernels()):
                return candidate
            causes.append(f"{candidate}: it has no kernels in {precision}")
        except (BackendUnavailable, NoKernel) as error:
            causes.append(f"{candidate}: {_cause(error)}")
    raise BackendUnavailable(
        "auto",
        f"none computes layers in {precision} on {kind}",
        "\n  ".join([*causes, "`r18 backends` shows what each one needs."]),
    )


def _with_integers(level: str, bits: int, network: ResNet) -> str:
    """The backends that compute a drop-in in int8 here, and where the model must be for them."""
    found: dict[str, list[str]] = {}
    for name in installed():
        try:
            backend = get_backend(name)
            device = backend.probe()
            if not device.simulated:
                _checked(backend, name, device.kind, level, INT8.name, bits, network)
                found.setdefault(device.kind, []).append(name)
        except (BackendUnavailable, NoKernel):
            continue
    parts = [f"{' and '.join(names)} on {kind}" for kind, names in found.items()]
    return f"int8 is computed by {', '.join(parts) or 'no backend that is installed'}"


def _checked(
    backend: Backend, name: str, kind: str, level: str, precision: str, bits: int, network: ResNet
) -> Choice:
    """The backend as a choice; raises unless it computes that level on that kind of device."""
    schedule = network.schedule("the model")
    _computes(backend, name, kind)
    if level not in _OPERATORS:
        if precision == INT8.name:
            schedule = quantized(fuse(schedule, level), bits)
        make_plan(backend, schedule, CompileOptions(precision=precision, fusion=level))
        return Choice(name, precision)
    kernels = [
        choose_kernel(
            fastest_first(backend, backend.kernels(), problem, precision),
            problem,
            precision,
            asked_by=f"backend '{name}'",
        )
        for problem in fuse(schedule, level).problems(1).values()
        if isinstance(problem.op, _OPERATORS[level])
    ]
    layouts = Counter(kernel.layout for kernel in kernels if kernel.op is Conv2d)
    return Choice(name, precision, max(layouts, key=layouts.__getitem__, default=None))


def _computes(backend: Backend, name: str, kind: str) -> None:
    """Raise `BackendUnavailable` unless it computes on PyTorch's tensors on that kind of device."""
    check_adopts(backend)
    found = backend.probe().kind
    if found != kind:
        raise BackendUnavailable(
            name,
            f"it computes on {found}, the model is on {kind}",
            f"Move the model with model.to('{found}'), or choose another backend.",
        )


def _cause(error: R18Error) -> str:
    return error.cause if isinstance(error, BackendUnavailable) else str(error).splitlines()[0]
