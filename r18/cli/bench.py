"""`r18 bench`: backends timed side by side, next to their peers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tabulate import tabulate

from r18.backend import Backend
from r18.backend.registry import VARIABLE, get_backend, load_backend, survey
from r18.bench import record as bench_record
from r18.bench.baselines import MODES, PEER
from r18.bench.contenders import Algorithm, contenders
from r18.bench.timing import BEST_RATIO, RATIO, Contender, Row, Runner, with_ratios
from r18.bench.timing import bench as measure
from r18.cli.app import FOUND
from r18.cli.options import (
    AsJson,
    BatchSizes,
    FusionLevel,
    NetworkName,
    PrecisionNames,
    RecordFolder,
    WeightsSource,
    integers,
    listed,
)
from r18.errors import BackendUnavailable, R18Error, UsageError
from r18.graph.schedule import Schedule, network
from r18.machine import machine, set_threads
from r18.records import FOLDER
from r18.weights import Weights, load_weights


def bench(
    backends: Annotated[
        str | None,
        typer.Option(
            help="Names of `r18 backends` or module:attr, separated by commas; or all that can "
            f"run. [{VARIABLE}, all]"
        ),
    ] = None,
    precision: PrecisionNames = "fp32",
    batch: BatchSizes = "1,8",
    fusion: FusionLevel = "all",
    algorithms: Annotated[
        str,
        typer.Option(
            help="Contenders of their own: OP=ALGORITHM, such as conv2d=direct,conv2d=im2col; an "
            "algorithm of `r18 kernels`, a glob over ids, or OP=all."
        ),
    ] = "",
    peers: Annotated[
        str,
        typer.Option(
            help=f"Some of: {', '.join(MODES)}; or all that run on the backends' devices. "
            "graph and compile are for CUDA, onnxruntime and openvino for the CPU."
        ),
    ] = "eager",
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads of backends and peers alike. [OMP_NUM_THREADS]", min=1),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Judge every output against float64; a wrong one is no row."),
    ] = False,
    warmup: Annotated[int, typer.Option(help="Untimed runs of each.", min=0)] = 3,
    repeat: Annotated[int, typer.Option(help="Timed runs of each.", min=1)] = 20,
    series: Annotated[
        int,
        typer.Option(help="How often all that is done; the table shows the spread.", min=1),
    ] = 1,
    network_name: NetworkName = "resnet18",
    weights: WeightsSource = "synthetic",
    per_step: Annotated[
        bool, typer.Option("--per-step", help="Also the time of every step and its kernel.")
    ] = False,
    from_host: Annotated[
        bool,
        typer.Option(
            "--from-host",
            help="Also feed each with uint8 pixels from host memory, batch after batch.",
        ),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Also write the times to the devices' records.")
    ] = False,
    records: RecordFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Time backends in turns, beside their peers, in one table.

    Times are medians over rounds in which the contenders take turns; p10..p90 is their spread, and
    "of series" that of the medians of whole series.
    The ratios are the time divided by torchvision's in eager mode, and by that of the fastest
    peer, on the same kind of device in the same precision and batch: below 1 is faster. Inputs
    are random and already on the device.

    A contender of one algorithm uses it for every step that it takes, and the preferred kernels
    for the others. A record's rows are replaced by those of a run with the same network,
    precision, fusion and batch, all together, as soon as they are there: they were timed in turns.

    From host memory each is compiled anew, to normalise pixels in its first kernel: while one
    batch is computed the next is copied, and every output is fetched. A second table has the time
    from output to output, what share of the device's own pace that is, and the copies alone.

    A backend named here must run; of all, those that cannot are left out, with the reason on
    stderr; so are peers. Peak memory is how far the process grew (Linux, CPU).

    Exit codes: 0 success, 1 an output is wrong (--check), 2 a wrong request.
    """
    if threads is not None:
        set_threads(threads)  # before anything is loaded that would look at it
    asked = backends or os.environ.get(VARIABLE) or "all"
    everything = asked == "all"
    skipped: list[dict[str, str]] = []

    def skip(contender: str, reason: str) -> None:
        skipped.append({"contender": contender, "reason": reason})
        typer.echo(f"left out: {contender}: {reason}", err=True)

    entrants = _all(skip) if everything else _named(listed(asked, "--backends"))
    schedule = network(network_name)
    loaded = load_weights(weights, schedule)
    field = contenders(
        entrants,
        schedule,
        loaded,
        precisions=listed(precision, "--precision"),
        batches=integers(batch, "--batch"),
        fusion=fusion,
        required=not everything,
        algorithms=_algorithms(algorithms, entrants),
        peers=peers,
    )

    def on_skip(contender: Contender, error: Exception) -> None:
        name = f"{contender.name}, {contender.precision}, batch {contender.shape[0]}"
        skip(name, _reason(error))

    host = machine()
    head = {
        "network": network_name,
        "weights": {"source": loaded.source, "sha256": loaded.sha256},
        "machine": host,
        "skipped": skipped,
    }
    recorded: dict[Path, None] = {}

    def keep(rows: list[Row]) -> None:
        for row in filter(_wrong, rows):
            what = f"its output is wrong: it loses {row.loss:.3g} times what it may against float64"
            skip(f"{row.backend}, {row.precision}, batch {row.batch}", what)
        if record:
            right = with_ratios([row for row in rows if not _wrong(row)])
            recorded.update(dict.fromkeys(bench_record.save(right, field, head, fusion, records)))

    with _progress() as bar:
        task = bar.add_task("")
        rows = measure(
            field,
            warmup=warmup,
            repeat=repeat,
            series=series,
            per_step=per_step,
            from_host=from_host,
            judge=_judge(schedule, loaded, field) if check else None,
            progress=lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
            on_skip=on_skip,
            on_group=keep,
        )
    wrong = any(map(_wrong, rows))
    rows = with_ratios([row for row in rows if not _wrong(row)])
    for path in recorded:
        typer.echo(f"recorded in {path}", err=True)
    if as_json:
        data = head | {"ratio": RATIO, "rows": [row.to_json() for row in rows]}
        typer.echo(json.dumps(data, indent=2))
    else:
        typer.echo(
            f"{network_name}, weights {loaded.source}, fusion {fusion}; "
            f"median of {_runs(repeat, series)}\n"
            f"host: {host['processor']}, {host['cpus']} CPUs, {host['threads']} threads"
        )
        for line in dict.fromkeys(f"{row.backend}: {row.device}" for row in rows):
            typer.echo(line)
        typer.echo(f"\n{table(rows)}")
        if any(row.from_host for row in rows):
            typer.echo(f"\nfrom host memory\n{from_host_table(rows)}")
        for row in rows if per_step else ():
            if row.steps:
                what = f"{row.backend}, {row.precision}, batch {row.batch}"
                typer.echo(f"\n{what}\n{step_table(row)}")
        if check:
            typer.echo(f"\n{_checked(rows)}")
    if wrong:
        raise typer.Exit(FOUND)


def _wrong(row: Row) -> bool:
    """Whether its output lost more than it may."""
    return (row.loss or 0.0) > 1


def table(rows: Sequence[Row]) -> str:
    """The cross-backend table; the ratio to the best peer where there are several."""
    several = any(row.best_peer not in ("", PEER) for row in rows)
    in_series = any(row.series > 1 for row in rows)
    headers = (
        "backend",
        "device",
        "precision",
        "batch",
        "ms/image",
        "p10..p90",
        *(["of series"] if in_series else []),
        "images/s",
        RATIO,
        *([BEST_RATIO] if several else []),
        "arena MB",
        "weights MB",
        "peak MB",
    )
    lines = [
        (
            row.backend,
            row.device_kind,
            row.precision,
            str(row.batch),
            _digits(row.ms_per_image),
            f"{_digits(row.p10_ms / row.batch)}..{_digits(row.p90_ms / row.batch)}",
            *([_span(row.series_ms, row.batch)] if in_series else []),
            _digits(row.images_per_second),
            *(
                "" if ratio is None else f"{ratio:.2f}"
                for ratio in ((row.ratio, row.best_ratio) if several else (row.ratio,))
            ),
            *(
                "" if size is None else f"{size / 1e6:.1f}"
                for size in (row.arena_nbytes, row.weight_nbytes, row.peak_rss_nbytes)
            ),
        )
        for row in rows
    ]
    align = ("left", "left", "left", *("right",) * (len(headers) - 3))
    return tabulate(lines, headers, disable_numparse=True, colalign=align if lines else None)


def from_host_table(rows: Sequence[Row]) -> str:
    """Those that were fed from host memory: times are of a batch."""
    headers = (
        *("backend", "device", "precision", "batch", "ms/batch", "least..most"),
        *("images/s", "of device-only", "copy ms", "copy GB/s"),
    )
    lines = []
    for row in rows:
        if row.from_host is None:
            continue
        fed = row.from_host.to_json(row.batch, row.median_ms)
        lines.append(
            (
                *(row.backend, row.device_kind, row.precision, str(row.batch)),
                _digits(fed["median_ms"]),
                f"{_digits(min(fed['runs_ms']))}..{_digits(max(fed['runs_ms']))}",
                _digits(fed["images_per_second"]),
                f"{fed['share']:.1%}",
                _digits(fed["copy_ms"]),
                f"{fed['copy_bytes_per_second'] / 1e9:.1f}",
            )
        )
    align = ("left", "left", "left", *("right",) * (len(headers) - 3))
    return tabulate(lines, headers, disable_numparse=True, colalign=align)


def _span(medians: Sequence[float], batch: int) -> str:
    """The least and the largest, a sample of the batch."""
    return f"{_digits(min(medians) / batch)}..{_digits(max(medians) / batch)}"


def step_table(row: Row) -> str:
    """One contender's steps: their times add up to a run outside of any graph."""
    total = sum(step.milliseconds for step in row.steps)
    lines = [
        (
            f"{step.step} {step.phase}".rstrip(),
            step.kernel,
            f"{step.milliseconds:.3f}",
            f"{step.milliseconds / total:.1%}",
        )
        for step in row.steps
    ]
    lines.append(("total", "", f"{total:.3f}", ""))
    headers = ("step", "kernel", "ms/batch", "share")
    align = ("left", "left", "right", "right")
    return tabulate(lines, headers, disable_numparse=True, colalign=align)


def _judge(
    schedule: Schedule, weights: Weights, field: Sequence[Contender]
) -> Callable[[Contender, Runner], float]:
    """The oracle's, which the core does not depend on."""
    try:
        from r18_oracle.network.outputs import judge_of
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--check asks the oracle, which does not import: {error}\n  pip install 'r18[oracle]'"
        ) from None
    return judge_of(schedule, weights, {contender.precision for contender in field})


def _checked(rows: Sequence[Row]) -> str:
    """How near the outputs came to what they may lose."""
    worst = max(rows, key=lambda row: row.loss or 0.0, default=None)
    if worst is None:
        return "no output was judged"
    return (
        f"outputs of {len(rows)} rows judged against float64: at most {worst.loss:.3g} of what is "
        f"allowed ({worst.backend}, {worst.precision}, batch {worst.batch})"
    )


def _runs(repeat: int, series: int) -> str:
    return f"{series} series of {repeat} runs" if series > 1 else f"{repeat} runs"


def _reason(error: Exception) -> str:
    """Why a contender was left out, in a line."""
    if isinstance(error, BackendUnavailable):
        return error.cause
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, R18Error) else f"{type(error).__name__}: {lines[0]}"


def _digits(value: float) -> str:
    """Four significant digits, and no exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}"


def _algorithms(text: str, backends: Mapping[str, Backend]) -> list[Algorithm]:
    """OP=ALGORITHM pairs; `all` stands for every algorithm that the backends have for the op."""
    found: dict[Algorithm, None] = {}
    for pair in listed(text, "--algorithms") if text else ():
        op, equals, algorithm = pair.partition("=")
        if not (op and equals and algorithm):
            raise UsageError(f"--algorithms takes OP=ALGORITHM, separated by commas, got '{pair}'")
        every = [k.algorithm for b in backends.values() for k in b.kernels() if k.op.name == op]
        names = every if algorithm == "all" and every else [algorithm]
        found |= dict.fromkeys((op, name) for name in names)
    return list(found)


def _named(names: Sequence[str]) -> dict[str, Backend]:
    """Each by the name to show; raises for one that is unknown or cannot run."""
    found: dict[str, Backend] = {}
    for name in names:
        backend = get_backend(name)
        found[backend.name if name == "auto" else name] = backend
    return found


def _all(skip: Callable[[str, str], None]) -> dict[str, Backend]:
    """Every backend that can run on hardware; `skip` is told of the others, with the cause."""
    found: dict[str, Backend] = {}
    for line in survey():
        if line.device is None:
            skip(line.name, line.cause)
        elif line.device.simulated:
            skip(line.name, f"{line.device}: its times say nothing of hardware")
        else:
            found[line.name] = load_backend(line.name)
    return found


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
