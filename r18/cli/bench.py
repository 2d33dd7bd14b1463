"""`r18 bench`: backends timed side by side, next to their baselines."""

from __future__ import annotations

import json
import os
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated

import typer

from r18.atomic import check_output, write_text
from r18.backend.registry import VARIABLE
from r18.bench import tables
from r18.bench.baselines import MODES
from r18.bench.run import Request, Result
from r18.bench.run import run as run_bench
from r18.bench.timing import Rounds
from r18.cli.app import FOUND
from r18.cli.options import (
    AsJson,
    BatchSizes,
    Check,
    FusionLevel,
    NetworkName,
    PrecisionNames,
    Record,
    RecordFolder,
    Threads,
    WeightsSource,
    checked_place,
    integers,
    listed,
    recording,
)
from r18.files import JSON_LIMIT
from r18.machine import set_threads
from r18.progress import run_progress
from r18.records import FOLDER, now

BackendNames = Annotated[
    str | None,
    typer.Option(
        help="Names of `r18 backends` or module:attr, separated by commas; or all that can run. "
        f"[{VARIABLE}, all]"
    ),
]
Algorithms = Annotated[
    str,
    typer.Option(
        help="Contenders of their own: OP=ALGORITHM, such as conv2d=direct,conv2d=im2col; an "
        "algorithm of `r18 kernels`, a glob over ids, or OP=all."
    ),
]
Baselines = Annotated[
    str,
    typer.Option(
        help=f"Some of: {', '.join(MODES)}; or all that run on the backends' devices. "
        "graph and compile are for CUDA, onnxruntime and openvino for the CPU."
    ),
]
Warmup = Annotated[int, typer.Option(help="Untimed runs of each.", min=0)]
Repeat = Annotated[int, typer.Option(help="Timed runs of each.", min=1)]
Series = Annotated[
    int, typer.Option(help="How often to repeat it all; the table shows the spread.", min=1)
]
PerStep = Annotated[
    bool, typer.Option("--per-step", help="Also the time of every step and its kernel.")
]
FromHost = Annotated[
    bool,
    typer.Option(
        "--from-host",
        help="Also feed each with uint8 pixels from host memory, batch after batch: the first "
        "kernel normalises them, and copies of the next batch overlap with it.",
    ),
]

Cold = Annotated[
    bool,
    typer.Option("--cold", help="Also time each with caches that are overwritten before each run."),
]


def _is_benchmark(file: BufferedReader) -> bool:
    try:
        data = json.loads(file.read(JSON_LIMIT))
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"machine_info", "benchmarks"} <= data.keys()


_check_benchmark = partial(check_output, kind="JSON file of pytest-benchmark", known=_is_benchmark)
BenchmarkFile = Annotated[
    Path | None,
    typer.Option(
        "--benchmark-json",
        metavar="FILE",
        callback=checked_place(_check_benchmark, "--benchmark-json"),
        help="Also write the times as pytest-benchmark does, for its compare and for CIs.",
    ),
]


def bench(
    backends: BackendNames = None,
    precision: PrecisionNames = "fp32",
    batch: BatchSizes = "1,8",
    fusion: FusionLevel = "all",
    algorithms: Algorithms = "",
    peers: Baselines = "eager",
    threads: Threads = None,
    check: Check = False,
    warmup: Warmup = 3,
    repeat: Repeat = 20,
    series: Series = 1,
    network_name: NetworkName = "resnet18",
    weights: WeightsSource = "synthetic",
    per_step: PerStep = False,
    from_host: FromHost = False,
    cold: Cold = False,
    record: Record = False,
    records: RecordFolder = FOLDER,
    benchmark: BenchmarkFile = None,
    as_json: AsJson = False,
) -> None:
    """Time backends in turns, next to their baselines, in one table, with their errors.

    Times are medians over rounds in which the contenders take turns; p10..p90 is their spread, and
    "of series" the spread of whole series' medians. The ratios divide the time by that of
    torchvision in eager mode, and of the fastest baseline, on the same kind of device in the same
    precision and batch: below 1 is faster. So does the ratio of the outputs' errors against
    float64; a row that is faster and less exact says "worse". Inputs are random and on the device,
    where each run reads the previous one's again. --cold and --from-host have tables of their own.

    A contender of one algorithm uses it for every step that it takes, and preferred kernels for
    others. A recorded run replaces all rows of its network, precision, fusion and batch. A backend
    named here must run; of `all`, those that cannot are reported on stderr, as are a busy machine
    and rows whose times spread widely. Peak memory is the process's growth (Linux, CPU).

    Exit codes: 0 success, 1 an output is wrong (--check), 2 a wrong request.
    """
    if threads is not None:
        set_threads(threads)  # before a library that reads it is loaded
    request = Request(
        _named(backends or os.environ.get(VARIABLE) or "all"),
        listed(precision, "--precision"),
        integers(batch, "--batch"),
        Rounds(warmup, repeat, series, per_step=per_step, from_host=from_host, cold=cold),
        fusion=fusion,
        algorithms=listed(algorithms, "--algorithms") if algorithms else (),
        baselines=peers,
        network=network_name,
        weights=weights,
        check=check,
        records=recording(record, records),
    )
    with run_progress() as progress:
        result = run_bench(request, on_left_out=_say_left_out, progress=progress)
    _say_notes(result)
    _write_benchmark(benchmark, result)
    typer.echo(json.dumps(result.to_json(), indent=2) if as_json else _text(request, result))
    if result.wrong:
        raise typer.Exit(FOUND)


def _write_benchmark(file: Path | None, result: Result) -> None:
    """Write the times as pytest-benchmark does, if a file was named."""
    if file is not None:
        head = result.head
        data = tables.pytest_benchmark(result.rows, head["network"], head["machine"], now())
        write_text(file, json.dumps(data, indent=2) + "\n")


def _named(asked: str) -> list[str] | None:
    return None if asked == "all" else listed(asked, "--backends")


def _say_left_out(contender: str, reason: str) -> None:
    typer.echo(f"left out: {contender}: {reason}", err=True)


def _say_notes(result: Result) -> None:
    for path in result.recorded:
        typer.echo(f"recorded in {path}", err=True)
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _text(request: Request, result: Result) -> str:
    rows, host = result.rows, result.head["machine"]
    runs = f"{request.rounds.repeat} runs"
    if request.rounds.series > 1:
        runs = f"{request.rounds.series} series of {runs}"
    parts = [
        f"{request.network}, weights {result.head['weights']['source']}, fusion {request.fusion}; "
        f"median of {runs}\n"
        "warm: each run reads the batch of the one before, so caches hold what fits of it\n"
        f"host: {host['processor']}, {host['cpus']} CPUs, {host['threads']} threads",
        *dict.fromkeys(f"{row.backend}: {row.device}" for row in rows),
        f"\n{tables.table(rows)}",
    ]
    if any(row.cold for row in rows):
        parts.append(f"\nwith caches overwritten before each run\n{tables.cold_table(rows)}")
    if any(row.from_host for row in rows):
        parts.append(f"\nfrom host memory\n{tables.from_host_table(rows)}")
    for row in rows if request.rounds.per_step else ():
        if row.steps:
            what = f"{row.backend}, {row.precision}, batch {row.batch}"
            parts.append(f"\n{what}\n{tables.step_table(row)}")
    if request.check:
        parts.append(f"\n{tables.judged(rows)}")
    return "\n".join(parts)
