"""Options that several subcommands take, and functions that convert their values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from r18.atomic import check_folder
from r18.backend import Backend, DeviceInfo
from r18.backend.registry import VARIABLE, checked_backend, get_backend, installed, title
from r18.errors import BackendUnavailable, NoKernel, UsageError
from r18.graph.passes import FUSION_LEVELS
from r18.graph.precision import PRECISIONS
from r18.graph.precision import precision as precision_named
from r18.graph.resnet import NETWORKS, network
from r18.graph.schedule import Schedule
from r18.weights import SOURCES


def starting(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A shell's completions of a word that has begun; Typer knows the parameter by its name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def backend_names(incomplete: str) -> list[str]:
    """The backends, for a shell."""
    return starting(["auto", *installed()])(incomplete)


BackendName = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help=f"A name of `r18 backends`, module:attr, or auto. [{VARIABLE}]",
        autocompletion=backend_names,
    ),
]
NetworkName = Annotated[
    str,
    typer.Option(
        "--network",
        help=f"One of: {', '.join(NETWORKS)}; with another head or size of images: "
        "NAME:classes=10,image_size=288.",
        autocompletion=starting(NETWORKS),
    ),
]
ImageSize = Annotated[
    int | None, typer.Option(help="Height and width of the input; the network's own if not said.")
]
FusionLevel = Annotated[
    str,
    typer.Option(
        help=f"One of: {', '.join(FUSION_LEVELS)}.", autocompletion=starting(FUSION_LEVELS)
    ),
]
PrecisionName = Annotated[
    str,
    typer.Option(help=f"One of: {', '.join(PRECISIONS)}.", autocompletion=starting(PRECISIONS)),
]
PrecisionNames = Annotated[
    str, typer.Option(help=f"Some of: {', '.join(PRECISIONS)}; separated by commas.")
]
BatchSizes = Annotated[str, typer.Option(help="Images at once; several separated by commas.")]


def checked_place(
    check: Callable[[Path, str], None], option: str
) -> Callable[[Path | None], Path | None]:
    """A callback for an option that says where to write: checked before anything is measured.

    check: `check_file` or `check_folder` of `r18.atomic`, or one built on them.
    """

    def checked(place: Path | None) -> Path | None:
        if place is not None:
            check(place, option)
        return place

    return checked


RecordFolder = Annotated[
    Path,
    typer.Option(
        "--records",
        help="Folder of the records.",
        # Some commands only read there.
        callback=checked_place(partial(check_folder, writable=False), "--records"),
    ),
]
WeightsSource = Annotated[str, typer.Option(help=f"One of: {', '.join(SOURCES)}.")]
Check = Annotated[
    bool, typer.Option("--check", help="Judge every output against float64; a wrong one is no row.")
]
Record = Annotated[
    bool, typer.Option("--record", help="Also write the times to the devices' records.")
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads of backends and baselines alike. [OMP_NUM_THREADS]", min=1),
]
KernelOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        help="STEP=KERNEL or OP=KERNEL, a kernel id or a glob over ids, such as "
        "conv2d=numpy/conv2d/direct/*; repeat it for several.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Result(Protocol):
    """The result of a command's library function."""

    def to_json(self) -> Any: ...

    def text(self) -> str: ...


def print_result(result: Result, as_json: bool, *, indent: int = 2) -> None:
    """Print a result as text, or as JSON."""
    typer.echo(json.dumps(result.to_json(), indent=indent) if as_json else result.text())


def chosen_schedule(name: str, image_size: int | None) -> Schedule:
    """A named network for images of that size, or of its own.

    Raises `UsageError` for a name that gives another size.
    """
    if image_size is None:
        return network(name)
    own = network(name).input_shape[-1]
    if own != image_size and "image_size=" in name.partition(":")[2]:
        raise UsageError(
            f"--network {name} and --image-size {image_size} give two sizes; leave one out"
        )
    return network(name, image_size=image_size)


def asked_backend(name: str | None) -> str:
    """The name for `get_backend`: the option, else the variable, else `auto`."""
    return name or os.environ.get(VARIABLE) or "auto"


def chosen_backend(name: str | None, precisions: Iterable[str] = ()) -> tuple[Backend, DeviceInfo]:
    """The backend and its device; stderr says which, and whether `auto` took it.

    precisions: what the command computes in. Raises `NoKernel` where `auto` took a backend without
    a kernel in one of them, and names the backends that have some.
    """
    backend = get_backend(name)
    device = backend.probe()
    is_auto = asked_backend(name) == "auto"
    how = " (taken by auto)" if is_auto else ""
    typer.echo(f"backend: {title(backend)}{how}, {device}", err=True)
    if is_auto:
        for precision in precisions:
            _check_precision(backend, precision)
    return backend, device


def _check_precision(backend: Backend, precision: str) -> None:
    if precision_named(precision).name in {kernel.precision.name for kernel in backend.kernels()}:
        return
    from r18.runtime.listing import entries

    able = [
        entry.line.name
        for entry in entries()
        if entry.line.device and not entry.line.device.simulated and precision in entry.precisions
    ]
    others = f"backends with {precision} here: {', '.join(able)}; choose one with --backend"
    raise NoKernel(
        f"backend '{backend.name}', which auto took, has no kernels in {precision}\n  "
        + (others if able else "`r18 backends` lists the precisions of each backend")
    )


def planning_backend(name: str | None, precisions: Iterable[str] = ()) -> Backend:
    """The backend to plan with. One that computes on a device of its own is not probed.

    One on the host is, so that a plan has kernels that this CPU runs. If that fails, it has all.
    precisions: as of `chosen_backend`.
    """
    asked = asked_backend(name)
    if asked == "auto":
        return chosen_backend(asked, precisions)[0]
    backend = checked_backend(asked)
    if type(backend).memory is Backend.memory:
        with suppress(BackendUnavailable):
            backend.probe()
    return backend


def recording(record: bool, folder: Path) -> Path | None:
    """The folder to record in, None without `record`.

    Raises `UsageError` for one that cannot be written: before anything runs.
    """
    if record:
        check_folder(folder, "--records")
    return folder if record else None


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line names an option, by its parameter's name."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def listed(text: str, what: str) -> list[str]:
    """The items of a list separated by commas; raises `UsageError` for an empty or repeated one."""
    items = [item.strip() for item in text.split(",")]
    if not all(items) or len(set(items)) != len(items):
        raise UsageError(f"{what} takes different values separated by commas, got '{text}'")
    return items


def integers(text: str, what: str) -> list[int]:
    """The integers of a list separated by commas, all from 1; raises `UsageError` for others."""
    items = listed(text, what)
    if not all(item.isdecimal() for item in items):
        raise UsageError(f"{what} takes integers separated by commas, got '{text}'")
    found = [int(item) for item in items]
    if min(found) < 1:
        raise UsageError(f"{what} must be at least 1, got '{text}'")
    return found


def kernel_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """`STEP=KERNEL` or `OP=KERNEL`, as in conv2d=numpy/conv2d/direct/*; raises `UsageError`."""
    overrides: dict[str, str] = {}
    for pair in pairs:
        target, equals, pattern = pair.partition("=")
        if not (target and equals and pattern):
            raise UsageError(
                f"--kernel takes STEP=KERNEL or OP=KERNEL, such as conv2d=numpy/conv2d/direct/*, "
                f"got '{pair}'"
            )
        if target in overrides:
            raise UsageError(f"--kernel names '{target}' twice; the last would win, give it once")
        overrides[target] = pattern
    return overrides
