"""Tables of times: next to the baselines, next to the floor, kernel by kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from r18.backend.tuned import Table as TuningTable
from r18.backend.tuned import read_table
from r18.bench import tuning
from r18.bench.baselines import TORCH
from r18.bench.error import NONE, error_cells
from r18.bench.record import floors, floors_of, fused_ops, group_name, in_order
from r18.bench.roofline import Ceilings, algorithm_of, limit
from r18.errors import UsageError
from r18.graph.ops import AvgPoolLinear, ConvMaxPool, ConvProjection, Op, Problem
from r18.graph.passes import fuse, fuse_pairs
from r18.graph.precision import precision as precision_named
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.records.kinds import CeilingsRecord
from r18.report.tables.conditions import (
    ERROR_HEADS,
    FROM_HOST,
    NOT_COLD,
    NOT_FED,
    STATES,
    error_captions,
    lines_of,
    state_captions,
)
from r18.report.tables.table import (
    Data,
    Options,
    Row,
    Table,
    asked_groups,
    batches,
    cell,
    days,
    heading,
    listed,
    loaded,
    needed,
    record_of,
    setting,
)

LIBRARIES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""Packages whose version a caption names."""

# -- bench -------------------------------------------------------------------------------------


def bench_table(options: Options, folder: Path) -> Table:
    """Contenders by precision and batch; rows timed in turns are adjacent.

    A backend's own program has a row for each state that it was timed in: see `lines_of`. The table
    has a column of peak memory if any row has one, as on a CPU.
    """
    groups = _asked(options, folder)
    rows = [
        line
        for place, group in groups
        for row in group["rows"]
        for line in lines_of(row, place, group["rows"])
    ]
    heads = (
        "backend | device | precision | batch | ms/image | images/s | / PyTorch | / best peer | "
        + ERROR_HEADS
    )
    align = "lllrrrrrrr"
    if any(row[-1] for row in rows):
        heads, align = f"{heads} | peak MB", f"{align}r"
    timed = [group for _, group in groups]
    fed = any(row.get("from_host") for group in timed for row in group["rows"])
    captions = [
        *bench_captions(timed),
        *state_captions(timed),
        *([FROM_HOST] if fed else []),
        *error_captions(row for group in timed for row in group["rows"]),
    ]
    return Table(heads, align, [row[: len(align)] for row in rows], captions)


def _asked(options: Options, folder: Path) -> list[tuple[Row, Data]]:
    """(device, precision and batch, group) as a marker selects them; `UsageError` for none."""
    network, fusion = options.get("network", "resnet18"), options.get("fusion", "all")

    def name(precision: str, batch: int) -> str:
        return group_name(network, precision, fusion, batch)

    found: list[tuple[Row, Data]] = [
        ((device, precision, str(batch)), group)
        for device in listed(options, "devices")
        for precision, batch, group in asked_groups(
            record_of(folder, "bench", device)["groups"], options, name
        )
    ]
    if not found:
        raise UsageError(
            f"no record of {', '.join(listed(options, 'devices'))} has a time of {network} in "
            f"{', '.join(listed(options, 'precisions'))}, fusion {fusion}, batch "
            f"{', '.join(map(str, batches(options)))}"
        )
    return found


def from_host_table(options: Options, folder: Path) -> Table:
    """Contenders fed with pixels from host memory, next to their own times on the device.

    Without such rows, the caption names the command that makes them.
    """
    fed = [
        (place, group, row, row["from_host"])
        for place, group in _asked(options, folder)
        for row in group["rows"]
        if row.get("from_host") is not None
    ]
    rows = [
        (
            row["backend"],
            *place,
            cell(row["median_ms"], ".4g"),
            cell(row["cold"]["median_ms"], ".4g") if row.get("cold") else NONE,
            cell(host["median_ms"], ".4g"),
            cell(host["images_per_second"], ",.0f"),
            cell(host["share"], ".1%"),
            cell(host["copy_ms"], ".4g"),
            cell(host["copy_bytes_per_second"] / 1e9, ".3g"),
        )
        for place, _, row, host in fed
    ]
    heads = (
        "backend | device | precision | batch | warm ms | cold ms | from host ms | images/s | "
        "of warm | copy only ms | copy GB/s"
    )
    captions = [_from_host_caption(group) for _, group, _, _ in fed]
    if fed:
        captions += state_captions(group for _, group, _, _ in fed)
    if not all(row.get("cold") for _, _, row, _ in fed):
        captions.append(NOT_COLD)
    missing = ["Not measured yet: `r18 bench --from-host --record` does."]
    return Table(heads, "lll" + "r" * 8, rows, captions if fed else missing)


def _from_host_caption(group: Data) -> str:
    fed = [row["from_host"] for row in group["rows"] if row.get("from_host")]
    spread = max((max(f["runs_ms"]) - min(f["runs_ms"])) / f["median_ms"] for f in fed)
    counts = sorted(f["batches"] for f in fed)
    span = " to ".join(dict.fromkeys((f"{counts[0]:,}", f"{counts[-1]:,}")))
    return (
        f"{heading(group, [])}: milliseconds per batch of uint8 pixels, medians of "
        f"{len(fed[0]['runs_ms'])} stretches of {span} batches; the stretches of one program "
        f"differ by at most {spread:.1%}."
    )


def bench_captions(groups: Iterable[Data]) -> list[str]:
    """The captions of a benchmark's groups: devices, software, dates and numbers of runs.

    Groups of one machine and set of versions share a line. It names the libraries that were timed
    in any of them, and the first and the last day. It ends with the largest spread of the medians
    of one program's series, for r18's programs and for the baselines.
    """
    alike: dict[tuple[str, int], list[Data]] = {}
    for group in groups:
        how = setting(group, _versions([group], LIBRARIES)), group.get("series", 1)
        alike.setdefault(how, []).append(group)
    return [f"{_timing(some)}{_runs(some)}{_apart(some)}." for some in alike.values()]


def _runs(groups: Iterable[Data]) -> str:
    """How many runs were timed, after how many others: one number, or those that occur."""
    found = list(groups)
    timed, untimed = (
        " or ".join(map(str, sorted({group[key] for group in found})))
        for key in ("repeat", "warmup")
    )
    return f"{timed} runs after {untimed} untimed ones"


def _apart(groups: Iterable[Data]) -> str:
    """The largest spreads in words; empty where each contender had a single series."""
    spreads: dict[str, list[float]] = {"r18": [], "baselines": []}
    for row in (row for group in groups for row in group["rows"]):
        series = row.get("series_ms", [])
        if len(series) > 1:
            spread = (max(series) - min(series)) / row["median_ms"]
            spreads["r18" if row.get("kernels") else "baselines"].append(spread)
    said = " and ".join(f"{max(found):.1%} ({whose})" for whose, found in spreads.items() if found)
    return f"; medians of single series differ by at most {said}" if said else ""


def _timing(groups: Sequence[Data]) -> str:
    """How groups with one caption were timed, up to the number of runs."""
    timed = {"torch", *(row["backend"] for group in groups for row in group["rows"])}
    how, series = setting(groups[0], _versions(groups, timed)), groups[0].get("series", 1)
    return f"{how}, {days(groups)}: medians of {f'{series} series of ' if series > 1 else ''}"


def _versions(groups: Sequence[Data], packages: Collection[str]) -> list[str]:
    """The libraries among `packages` that are installed, with the version that groups share."""
    installed = groups[0]["environment"]["packages"]
    return [
        f"{said} {installed[package]}"
        for package, said in LIBRARIES.items()
        if package in packages and package in installed
    ]


# -- roofline ----------------------------------------------------------------------------------


def roofline_table(options: Options, folder: Path) -> Table:
    """A backend's network next to its floor and to PyTorch, for every recorded group.

    The floor is the sum over the program's steps, by the algorithms of its kernels; the direct
    floor is by the definition. Steps are fused as the program fuses them. Both are left out if no
    rate on record bounds the precision.
    """
    device, backend = needed(options, "device"), options.get("backend", "cupy")
    asked = {"network": options.get("network", "resnet18"), "fusion": options.get("fusion", "all")}
    ceilings = Ceilings.from_record(loaded(folder, CeilingsRecord, device))
    rows: list[Row] = []
    groups: list[Data] = []
    owners: list[Data] = []
    for group in in_order(record_of(folder, "bench", device)["groups"]):
        own = next((row for row in group["rows"] if row["backend"] == backend), None)
        if own is None or any(group[key] != value for key, value in asked.items()):
            continue
        groups.append(group)
        owners.append(own)
        rows.append(_next_to_floor(group, own, *_floors(group, own, ceilings)))
    if not rows:
        raise UsageError(f"the record of {device} has no time of '{backend}' for {asked}")
    heads = (
        "precision | batch | direct floor ms | floor ms | measured ms | measured / floor | "
        "cold ms | from host ms | best PyTorch ms | its mode | PyTorch / r18 | error / PyTorch"
    )
    captions = [
        _ceilings_words(ceilings),
        *bench_captions(groups),
        *state_captions(groups),
        *error_captions(owners),
    ]
    if any(row.get(state) is None for row in owners for state in STATES):
        captions.append(NOT_FED)
    return Table(heads, "l" + "r" * 8 + "lrr", rows, captions)


def _floors(group: Data, own: Data, ceilings: Ceilings) -> tuple[float | None, float | None]:
    """The milliseconds of a row's network by the definition, and by the row's algorithms."""
    if not ceilings.bounds(group["precision"]):
        return None, None
    direct, least = floors(group, ceilings, fused=fused_ops(own)), floors_of(own, group, ceilings)
    one, other = (sum(step.floor_ms for step in found.values()) for found in (direct, least))
    return one, other


def _next_to_floor(group: Data, own: Data, direct: float | None, floor: float | None) -> Row:
    """A row: a program's median next to its floors and to PyTorch's fastest mode."""
    median = own["median_ms"]
    torch = [row for row in group["rows"] if row["backend"] in TORCH]
    best = min(torch, key=lambda row: float(row["median_ms"]), default=None)
    way = best and TORCH[best["backend"]]
    return (
        group["precision"],
        str(group["batch"]),
        cell(direct, ".4g"),
        cell(floor, ".4g"),
        cell(median, ".4g"),
        cell(floor and median / floor, ".2f"),
        *(cell(own[state]["median_ms"], ".4g") if own.get(state) else NONE for state in STATES),
        cell(best and best["median_ms"], ".4g"),
        way.mode + (", channels-last" if way.channels_last else "") if way else "",
        cell(best and best["median_ms"] / median, ".2f"),
        error_cells(own)[1],
    )


def _ceilings_words(ceilings: Ceilings) -> str:
    return f"Ceilings of {ceilings.device}, {ceilings.date[:10]}: {ceilings.words('T')}."


# -- tuned -------------------------------------------------------------------------------------


def tuned_table(options: Options, folder: Path) -> Table:
    """The kernel that a backend's tuning table has for each problem of a network, and its time."""
    device, name = needed(options, "device"), needed(options, "precision")
    size, before = needed(options, "batch"), options.get("before")
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"the table's marker says batch={size}, which is not a number of images")
    batch, backend = int(size), options.get("backend", "cupy")
    ceilings = Ceilings.from_record(loaded(folder, CeilingsRecord, device))
    now = _tuned(tuning.shipped_table(backend, device))
    old = None if before is None else _tuned(folder / f"tuned-{device}-{before}.json")
    rows: list[Row] = []
    for problem, steps in _tuned_problems(network(options.get("network", "resnet18")), batch):
        found = now.timing(problem, name)
        if found is None:
            continue
        took = found.microseconds
        lowest = limit(problem, precision_named(name), ceilings, algorithm_of(found.kernel))
        floor = 1e3 * lowest.floor_ms
        cells = [", ".join(steps), f"{floor:.1f}", f"{took:.1f}", f"{took / floor:.2f}"]
        if old is not None:
            older = old.timing(problem, name)
            then = None if older is None else older.microseconds
            cells += [cell(then, ".1f"), cell(then and then / took, ".2f")]
        rows.append((*cells, algorithm_of(found.kernel) or found.kernel))  # or "apart"
    if not rows:
        raise UsageError(f"the table of {device} has no time in {name} at batch {batch}")
    then_heads = "" if before is None else f" | {before} µs | {before} / now"
    heads = f"steps | floor µs | now µs | now / floor{then_heads} | algorithm now"
    caption = (
        f"{now.device}, {name}, batch {batch}: one launch of many in a graph, as `r18 tune` "
        f"measures, over {tuning.PLACES} copies of its inputs and outputs in turn, so that the L2 "
        f"holds what fits of them all; floors by the ceilings of {ceilings.date[:10]}: "
        f"{ceilings.words_of(name)}."
    )
    return Table(heads, "l" + "r" * (len(rows[0]) - 2) + "l", rows, [caption])


def _tuned(path: Path) -> TuningTable:
    if not path.is_file():
        raise UsageError(f"there is no tuning table {path}: r18 tune --out writes one")
    return read_table(path)


_PAIRS: dict[type[Op], str] = {
    ConvMaxPool: " with its max-pooling",
    ConvProjection: " with its projection",
    AvgPoolLinear: " with the pooling before it",
}


def _tuned_problems(schedule: Schedule, batch: int) -> Iterator[tuple[Problem, list[str]]]:
    """The problems of a network at level `all` that `r18 tune` measures, each with its steps.

    A convolution that may be fused with its max-pooling or with the projection that it adds, or a
    linear layer with the pooling before it, appears both ways.
    """
    fused = fuse(schedule, "all")
    pairs = fuse_pairs(fused).problems(batch)
    found: dict[Problem, list[str]] = {}
    for name, problem in fused.problems(batch).items():
        for one in dict.fromkeys((problem, pairs.get(name, problem))):
            if isinstance(one.op, tuning.TUNED_OPS):
                found.setdefault(one, []).append(name + _PAIRS.get(type(one.op), ""))
    return iter(found.items())
