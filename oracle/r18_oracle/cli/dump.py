"""`r18 dump`: write the checkpoints of a backend, to compare with another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from r18.backend import CompileOptions
from r18.bench.baselines.ways import EXPORTED
from r18.cli.options import (
    BackendName,
    NetworkName,
    PrecisionName,
    WeightsSource,
    chosen_backend,
)
from r18.errors import UsageError, counted
from r18.graph.passes import FUSION_LEVELS
from r18.graph.resnet import network
from r18.graph.schedule import CANONICAL
from r18.weights import load_weights
from r18.weights.precisions import CALIBRATED

if TYPE_CHECKING:
    from r18_oracle.dumps.files import TensorFile


Count = Annotated[int | None, typer.Option(help="Seeded images to run; 1 if not said.", min=1)]
Seed = Annotated[int | None, typer.Option(help="Of the seeded images; 0 if not said.", min=0)]
Photographs = Annotated[
    list[Path] | None, typer.Option(help="A photograph instead; repeat it for a batch.")
]
RawInput = Annotated[
    Path | None,
    typer.Option("--input", help="Raw little-endian float32 NCHW values instead."),
]
Checkpoints = Annotated[
    str,
    typer.Option(
        help=f"'canonical' ({', '.join(CANONICAL)}), 'all' (every torchvision module path), "
        "or names separated by commas."
    ),
]
Level = Annotated[
    str | None,
    typer.Option(
        help=f"One of: {', '.join(FUSION_LEVELS)}. If not said: all for the canonical "
        "checkpoints and int8, else none, the level at which every checkpoint exists."
    ),
]
Peer = Annotated[
    str | None,
    typer.Option(
        help=f"In int8, one of {', '.join(EXPORTED)} instead of a backend; every value is dumped."
    ),
]
Unoptimised = Annotated[
    bool,
    typer.Option(
        "--unoptimised", help="With --peer: the library runs each node in float32, and fuses none."
    ),
]


class _Write(TypedDict):
    overwrite: bool
    progress: Callable[[TensorFile], None]


def dump(
    out: Annotated[Path, typer.Option(help="Folder to write; it appears whole or not at all.")],
    backend: BackendName = None,
    precision: PrecisionName = "fp32",
    weights: WeightsSource = "synthetic",
    network_name: NetworkName = "resnet18",
    batch: Count = None,
    seed: Seed = None,
    image: Photographs = None,
    input_file: RawInput = None,
    checkpoints: Checkpoints = "canonical",
    fusion: Level = None,
    peer: Peer = None,
    unoptimised: Unoptimised = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier dump.")] = False,
) -> None:
    """Run a backend and write its checkpoints: raw tensors and a manifest, for `r18 diff`.

    In int8 the checkpoints are integers, each with its scale.

    The input is seeded and the same bits on every machine, or photographs, or a raw file; it is
    stored next to the checkpoints as input.bin.
    """
    from r18_oracle.dumps.dumps import write_dump
    from r18_oracle.dumps.peers import write_peer_dump
    from r18_oracle.network.images import chosen

    schedule = network(network_name)
    if peer is None and unoptimised:
        raise UsageError("--unoptimised is for --peer, which was not given")
    if peer is not None and (backend is not None or fusion is not None or precision != "int8"):
        raise UsageError(
            "--peer runs the quantised network by itself: give it with --precision int8, and "
            "without --backend and --fusion"
        )
    runner = None if peer is not None else chosen_backend(backend, [precision])[0]
    loaded = load_weights(weights, schedule, precision)
    images = chosen(
        schedule, loaded.preprocess, files=image or (), raw=input_file, batch=batch, seed=seed
    )
    what = schedule, loaded, images
    how: _Write = {"overwrite": force, "progress": _print_saved}
    if runner is None:
        assert peer is not None  # it is why there is no backend
        written = write_peer_dump(out, peer, *what, optimised=not unoptimised, **how)
    else:
        whole = checkpoints == "canonical" or precision in CALIBRATED
        level = fusion or ("all" if whole else "none")
        options = CompileOptions(precision=precision, fusion=level)
        written = write_dump(out, runner, *what, checkpoints=checkpoints, options=options, **how)
    typer.echo(f"dumped: {counted(len(written.checkpoints), 'checkpoint')} -> {written}")


def _print_saved(file: TensorFile) -> None:
    typer.echo(f"saved: {file.name} {list(file.shape)} -> {file.path}")
