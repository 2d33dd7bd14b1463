"""`roofline` from options to tables: what `r18 roofline` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from r18 import records
from r18.backend import Backend, Ceiling, CompileOptions, DeviceInfo, Plan
from r18.bench import ceilings as measured
from r18.bench.contenders import Compiled, program_contender
from r18.bench.roofline import WHAT, Ceilings, Line, largest_losses, lines
from r18.bench.rows import Contender, Row, Runner
from r18.bench.timing import bench
from r18.errors import UsageError
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.machine import thread_count
from r18.records.kinds import CeilingsRecord
from r18.weights import Weights, load_weights

SHOWN = 5
"""Steps in the list of the largest lost time."""


@dataclass(frozen=True)
class Result:
    """A roofline: where, by which ceilings, and for each program its plan, times and steps."""

    backend: str
    device: DeviceInfo
    ceilings: Ceilings
    schedule: Schedule
    weights: Weights
    programs: Sequence[tuple[Plan, Row, Sequence[Line]]]

    def text(self) -> str:
        """The ceilings, and a table a program with the steps that lose the most time."""
        head = f"{self.schedule.name} on {self.backend}: {self.device}\n{_said(self.ceilings)}"
        return "\n\n".join([head, *(text(*program) for program in self.programs)])

    def to_json(self) -> dict[str, Any]:
        return _json(self.device, self.ceilings, self.schedule, self.weights, self.programs)


def run(
    backend: Backend,
    device: DeviceInfo,
    options: Sequence[CompileOptions],
    *,
    network_name: str = "resnet18",
    weights: str = "synthetic",
    warmup: int = 3,
    repeat: int = 20,
    folder: Path = records.FOLDER,
    command: str = measured.MEASURE,
    warn: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Time each program step by step, and set every step against the device's recorded ceilings.

    folder: of the records. command: what records missing ceilings, for the message. warn: called if
    the ceilings were measured with other threads.
    Raises `UsageError` where a ceiling is missing, before anything is timed.
    """
    ceilings = measured.read(folder, device, command)
    for one in options:
        ceilings.rate(one.precision)  # a missing one is reported before minutes of timing
    if ceilings.threads not in (None, thread_count()):
        warn(
            f"the ceilings were measured with {ceilings.threads} threads, this runs with "
            f"{thread_count()}: choose with --threads, or --measure again"
        )
    schedule = network(network_name)
    loaded = load_weights(weights, schedule)
    found = timed(backend, device, schedule, loaded, options, warmup, repeat, progress)
    programs = [(plan, row, lines(plan, row.steps, ceilings)) for plan, row in found]
    return Result(backend.name, device, ceilings, schedule, loaded, programs)


def measure(
    backend: Backend, device: DeviceInfo, folder: Path, progress: Callable[[str], None]
) -> tuple[Path, list[str]]:
    """Measure the device's ceilings and write their record; its path, and warnings.

    Raises `UsageError` where that would lose the rates of instructions on record, because the
    backend does not measure any, and what `r18.bench.ceilings.measure` raises.
    """
    path = records.path_of(folder, WHAT, device)
    before = records.load(path, CeilingsRecord)

    def instructions() -> tuple[Ceiling, ...]:
        found = backend.ceilings(progress)
        if before is not None and before.instructions and not found:
            raise UsageError(
                f"backend '{backend.name}' does not measure the instructions of {device}, whose "
                f"rates are in {path}\n  measure with the backend that did, or delete the record"
            )
        return found

    record = measured.measure(device, instructions=instructions, progress=progress)
    records.write(path, record)
    return path, list(measured.warnings(record))


def timed(
    backend: Backend,
    device: DeviceInfo,
    schedule: Schedule,
    weights: Weights,
    options: Sequence[CompileOptions],
    warmup: int,
    repeat: int,
    progress: Callable[[str], None],
) -> list[tuple[Plan, Row]]:
    """Each program's plan, and its times step by step and as a whole."""
    plans: dict[int, Plan] = {}

    def watched(index: int, own: Contender) -> Contender:
        def make() -> Runner:
            runner = own.make()
            assert isinstance(runner, Compiled)
            plans[index] = runner.program.plan
            return runner

        return replace(own, make=make)

    field = [
        watched(index, program_contender(backend.name, device, backend, schedule, weights, one))
        for index, one in enumerate(options)
    ]
    rows = bench(
        field,
        warmup=warmup,
        repeat=repeat,
        per_step=True,
        progress=lambda what, done, total: progress(f"{what} ({done} of {total} runs)"),
    )
    return [(plans[index], row) for index, row in enumerate(rows)]


# -- text --------------------------------------------------------------------------------------

HEADS = ("step", "kernel", "GFLOP", "MB", "floor ms", "measured ms", "of floor", "binds", "lost ms")


def text(plan: Plan, row: Row, steps: Sequence[Line]) -> str:
    """The table of a plan, its totals, and where the most time is lost."""
    cells = [
        (
            line.step,
            line.kernel,
            f"{line.limit.operations / 1e9:.3f}",
            f"{line.limit.nbytes / 1e6:.2f}",
            f"{line.limit.floor_ms:.4f}",
            f"{line.measured_ms:.4f}",
            f"{line.ratio:.0%}",
            line.limit.binds,
            f"{line.lost_ms:.4f}",
        )
        for line in steps
    ]
    floor = sum(line.limit.floor_ms for line in steps)
    direct = sum(line.direct.floor_ms for line in steps)
    total = sum(line.measured_ms for line in steps)
    work = sum(line.limit.operations for line in steps)
    moved = sum(line.limit.nbytes for line in steps)
    sums = (f"{work / 1e9:.3f}", f"{moved / 1e6:.2f}", f"{floor:.4f}", f"{total:.4f}")
    cells.append(("total", "", *sums, f"{floor / total:.0%}", "", f"{total - floor:.4f}"))
    align = ("left", "left", *["right"] * 5, "left", "right")
    asked = plan.options
    parts = [
        f"{asked.precision}, batch {asked.batch}, fusion {asked.fusion}: a run takes "
        f"{row.median_ms:.4f} ms; the floor is {floor:.4f}, by the definition {direct:.4f}",
        tabulate(cells, HEADS, disable_numparse=True, colalign=align),
    ]
    if above := sum(line.ratio > 1 for line in steps):
        why = "whose tensors were still in a cache, or ceilings measured too low"
        parts.append(f"above 100 %: {above} {why}")
    losses = largest_losses(steps, SHOWN)
    parts.append("largest lost time" if losses else "no step loses time")
    parts += [
        f"  {place}. {line.step}: {line.lost_ms:.4f} ms of {line.measured_ms:.4f}, bound by "
        f"{line.limit.binds} ({line.kernel})"
        for place, line in enumerate(losses, start=1)
    ]
    return "\n".join(parts)


def _said(ceilings: Ceilings) -> str:
    threads = "" if ceilings.threads is None else f", {ceilings.threads} threads"
    return f"ceilings of {ceilings.date[:10]}{threads}: {ceilings.words('G')}"


def _json(
    device: DeviceInfo,
    ceilings: Ceilings,
    schedule: Schedule,
    weights: Weights,
    results: Sequence[tuple[Plan, Row, Sequence[Line]]],
) -> dict[str, Any]:
    return {
        "device": device.name,
        "network": schedule.name,
        "weights": {"source": weights.source, "sha256": weights.sha256},
        "ceilings": {
            "device": ceilings.device,
            "date": ceilings.date,
            "threads": ceilings.threads,
            "operations_per_second": dict(ceilings.rates),
            "bytes_per_second": ceilings.bandwidth,
            "sources": dict(ceilings.sources),
        },
        "programs": [
            {
                "backend": plan.backend,
                "precision": plan.options.precision,
                "fusion": plan.options.fusion,
                "batch": plan.options.batch,
                "floor_ms": sum(line.limit.floor_ms for line in steps),
                "measured_ms": sum(line.measured_ms for line in steps),
                "run_ms": row.median_ms,
                "steps": [line.to_json() for line in steps],
                "largest_lost_time": [line.step for line in largest_losses(steps, SHOWN)],
            }
            for plan, row, steps in results
        ],
    }
