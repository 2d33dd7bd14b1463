"""Tables of times: next to the baselines, next to the floor, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from r18.backend.tuned import Table as TuningTable
from r18.backend.tuned import read_table
from r18.bench import tuning
from r18.bench.baselines import TORCH
from r18.bench.record import floors, group_name, in_order, pools
from r18.bench.roofline import WHAT as CEILINGS
from r18.bench.roofline import Ceilings, limit
from r18.errors import UsageError
from r18.graph.ops import ConvMaxPool, Problem
from r18.graph.passes import fuse, fuse_pool
from r18.graph.precision import precision as precision_named
from r18.graph.schedule import Schedule, network
from r18.report.tables.table import MISSING, Row, Table, heading, needed, record_of

# -- bench -------------------------------------------------------------------------------------


def bench_table(options: Mapping[str, str], folder: Path) -> Table:
    """Contenders by precision and batch: what took turns stands together.

    Peak memory is shown where there is any: a process on a CPU has one.
    """
    rows: list[Row] = []
    groups: list[Mapping[str, Any]] = []
    for place, group in _asked(options, folder):
        groups.append(group)
        rows += [(row["backend"], *place, *_measured(row)) for row in group["rows"]]
    if all(row[-1] == MISSING for row in rows):
        rows = [row[:-1] for row in rows]
    heads = BENCH_HEADS[: len(rows[0])]
    caption = "<br>\n".join(bench_captions(groups))
    return Table(heads, ("lll" + "r" * len(heads))[: len(heads)], rows, caption)


def _asked(options: Mapping[str, str], folder: Path) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """The groups that a marker asks for, behind their cells; `UsageError` where there is none."""
    devices = needed(options, "devices").split(",")
    precisions = needed(options, "precisions").split(",")
    batches = [int(batch) for batch in needed(options, "batches").split(",")]
    network, fusion = options.get("network", "resnet18"), options.get("fusion", "all")
    found = False
    for device in devices:
        groups = record_of(folder, "bench", device)["groups"]
        for precision in precisions:
            for batch in batches:
                group = groups.get(group_name(network, precision, fusion, batch))
                if group is not None:
                    found = True
                    yield (device, precision, str(batch)), group
    if not found:
        raise UsageError(
            f"no record of {', '.join(devices)} has a time of {network} in "
            f"{', '.join(precisions)}, fusion {fusion}, batch {', '.join(map(str, batches))}"
        )


def from_host_table(options: Mapping[str, str], folder: Path) -> Table:
    """Contenders fed with pixels from host memory, next to their own time on the device.

    Of records that have none, how to make them.
    """
    rows: list[Row] = []
    captions: dict[str, None] = {}
    for place, group in _asked(options, folder):
        for row in group["rows"]:
            if (fed := row.get("from_host")) is None:
                continue
            captions[_from_host_caption(group)] = None
            rows.append((row["backend"], *place, f"{row['median_ms']:.4g}", *_fed(fed)))
    missing = "Not measured yet: `r18 bench --from-host --record` does."
    return Table(FROM_HOST_HEADS, "lll" + "r" * 7, rows, "<br>\n".join(captions) or missing)


FROM_HOST_HEADS = (
    *("backend", "device", "precision", "batch", "device-only ms", "from host ms", "images/s"),
    *("of device-only", "copy alone ms", "copy GB/s"),
)


def _fed(fed: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a contender behind its own time."""
    yield f"{fed['median_ms']:.4g}"
    yield f"{fed['images_per_second']:,.0f}"
    yield f"{fed['share']:.1%}"
    yield f"{fed['copy_ms']:.4g}"
    yield f"{fed['copy_bytes_per_second'] / 1e9:.3g}"


def _from_host_caption(group: Mapping[str, Any]) -> str:
    fed = [row["from_host"] for row in group["rows"] if row.get("from_host")]
    spread = max((max(f["runs_ms"]) - min(f["runs_ms"])) / f["median_ms"] for f in fed)
    return (
        f"{heading(group, [])}: milliseconds a batch of uint8 pixels, medians of "
        f"{len(fed[0]['runs_ms'])} stretches of {_span(f['batches'] for f in fed)} batches; the "
        f"stretches of one program differ by at most {spread:.1%}."
    )


def _span(counts: Iterable[int]) -> str:
    known = sorted(counts)
    return " to ".join(dict.fromkeys((f"{known[0]:,}", f"{known[-1]:,}")))


LIBRARIES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""Packages of which a caption tells the version."""

BENCH_HEADS = (
    "backend",
    "device",
    "precision",
    "batch",
    "ms/image",
    "images/s",
    "/ PyTorch",
    "/ best peer",
    "peak MB",
)


def _measured(row: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a contender behind its batch."""
    yield f"{row['ms_per_image']:.4g}"
    yield f"{row['images_per_second']:,.0f}"
    for ratio in (row["ratio"], row["best_ratio"]):
        yield MISSING if ratio is None else f"{ratio:.2f}"
    peak = row["peak_rss_nbytes"]
    yield MISSING if peak is None else f"{peak / 1e6:,.0f}"


def bench_captions(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Of a record's groups: devices, what they were timed with, when, and how often.

    Groups that agree in these share a line, which says by how much the medians of one program's
    series differ at most: for r18's programs, and for the baselines.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for group in groups:
        rows.setdefault(_timing(group), []).extend(group["rows"])
    return [f"{how}{_apart(timed)}." for how, timed in rows.items()]


def _apart(rows: Iterable[Mapping[str, Any]]) -> str:
    """The largest difference between medians of series, in words; none with single series."""
    spreads: dict[str, list[float]] = {"r18": [], "baselines": []}
    for row in rows:
        series = row.get("series_ms", [])
        if len(series) > 1:
            spread = (max(series) - min(series)) / row["median_ms"]
            spreads["r18" if row.get("kernels") else "baselines"].append(spread)
    said = " and ".join(f"{max(found):.1%} ({whose})" for whose, found in spreads.items() if found)
    return f"; medians of single series differ by at most {said}" if said else ""


def _timing(group: Mapping[str, Any]) -> str:
    """A group's words."""
    versions = group["environment"]["packages"]
    timed = {"torch", *(row["backend"] for row in group["rows"])} & set(versions)
    software = [f"{said} {versions[p]}" for p, said in LIBRARIES.items() if p in timed]
    series = group.get("series", 1)
    return (
        f"{heading(group, software)}: medians of {f'{series} series of ' if series > 1 else ''}"
        f"{group['repeat']} runs after {group['warmup']} untimed ones"
    )


# -- roofline ----------------------------------------------------------------------------------


def roofline_table(options: Mapping[str, str], folder: Path) -> Table:
    """How far a backend's network is from its floor, in every cell that the record has.

    The floor is the sum over the steps, of those that the program has: with the pooled stem where
    it pools. It is left out where no rate of the precision was measured.
    """
    device, backend = needed(options, "device"), options.get("backend", "cupy")
    asked = {"network": options.get("network", "resnet18"), "fusion": options.get("fusion", "all")}
    ceilings = Ceilings.from_record(record_of(folder, CEILINGS, device))
    rows: list[Row] = []
    groups: list[Mapping[str, Any]] = []
    for group in in_order(record_of(folder, "bench", device)["groups"]):
        own = next((row for row in group["rows"] if row["backend"] == backend), None)
        if own is None or any(group[key] != value for key, value in asked.items()):
            continue
        groups.append(group)
        floor = None
        if ceilings.has(group["precision"]):
            steps = floors(group, ceilings, pooled=pools(own)).values()
            floor = sum(step.floor_ms for step in steps)
        rows.append((group["precision"], str(group["batch"]), *_beside(group, own, floor)))
    if not rows:
        raise UsageError(f"the record of {device} has no time of '{backend}' for {asked}")
    captions = [_ceilings_words(ceilings), *bench_captions(groups)]
    return Table(ROOFLINE_HEADS, "lrrrrrlr", rows, "<br>\n".join(captions))


ROOFLINE_HEADS = (
    *("precision", "batch", "floor ms", "measured ms", "measured / floor"),
    *("best PyTorch ms", "its mode", "PyTorch / r18"),
)


def _beside(group: Mapping[str, Any], own: Mapping[str, Any], floor: float | None) -> Iterator[str]:
    """The cells behind a batch: a row's median next to its floor and PyTorch's least."""
    median = own["median_ms"]
    yield MISSING if floor is None else f"{floor:.4g}"
    yield f"{median:.4g}"
    yield MISSING if floor is None else f"{median / floor:.2f}"
    peers = [row for row in group["rows"] if row["backend"] in TORCH]
    if not peers:
        yield from (MISSING,) * 3
        return
    best = min(peers, key=lambda row: row["median_ms"])
    way = TORCH[best["backend"]]
    yield f"{best['median_ms']:.4g}"
    yield way.mode + (", channels-last" if way.channels_last else "")
    yield f"{best['median_ms'] / median:.2f}"


def _ceilings_words(ceilings: Ceilings) -> str:
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in ceilings.rates.items())
    return (
        f"Ceilings of {ceilings.device}, {ceilings.date[:10]}: {rates} TFLOP/s; copy "
        f"{ceilings.bandwidth / 1e12:.3g} TB/s."
    )


# -- tuned -------------------------------------------------------------------------------------


def tuned_table(options: Mapping[str, str], folder: Path) -> Table:
    """The kernel that a backend's table has for each problem of a network, and how fast it is."""
    device, name = needed(options, "device"), needed(options, "precision")
    size, before = needed(options, "batch"), options.get("before")
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"the table's marker says batch={size}, which is no number of images")
    batch, backend = int(size), options.get("backend", "cupy")
    ceilings = Ceilings.from_record(record_of(folder, CEILINGS, device))
    now = _tuned(tuning.shipped_table(backend, device))
    old = None if before is None else _tuned(folder / f"tuned-{device}-{before}.json")
    rows: list[Row] = []
    for problem, steps in _tuned_problems(network(options.get("network", "resnet18")), batch):
        found = now.timing(problem, name)
        if found is None:
            continue
        floor = 1e3 * limit(problem, precision_named(name), ceilings).floor_ms
        cells = [", ".join(steps), f"{floor:.1f}", f"{found.microseconds:.1f}"]
        cells.append(f"{found.microseconds / floor:.2f}")
        if old is not None:
            then = old.timing(problem, name)
            cells.append(MISSING if then is None else f"{then.microseconds:.1f}")
            cells.append(
                MISSING if then is None else f"{then.microseconds / found.microseconds:.2f}"
            )
        parts = found.kernel.split("/")  # "apart" has no algorithm
        rows.append((*cells, parts[2] if len(parts) > 2 else found.kernel))
    if not rows:
        raise UsageError(f"the table of {device} has no time in {name} at batch {batch}")
    heads = ["steps", "floor µs", "now µs", "now / floor"]
    heads += [] if before is None else [f"{before} µs", f"{before} / now"]
    heads.append("algorithm now")
    caption = (
        f"{now.device}, {name}, batch {batch}: one launch of many in a graph, as `r18 tune` "
        f"measures; floors by the ceilings of {ceilings.date[:10]}."
    )
    return Table(heads, "l" + "r" * (len(heads) - 2) + "l", rows, caption)


def _tuned(path: Path) -> TuningTable:
    if not path.is_file():
        raise UsageError(f"there is no tuning table {path}: r18 tune --out writes one")
    return read_table(path)


def _tuned_problems(schedule: Schedule, batch: int) -> Iterator[tuple[Problem, list[str]]]:
    """What `r18 tune` measures of a network at level `all`, and the steps that each problem is of.

    A convolution that may be computed with its max-pooling is there both ways.
    """
    fused = fuse(schedule, "all")
    pooled = fuse_pool(fused).problems(batch)
    found: dict[Problem, list[str]] = {}
    for name, problem in fused.problems(batch).items():
        for one in dict.fromkeys((problem, pooled.get(name, problem))):
            if isinstance(one.op, tuning.TUNED_OPS):
                words = f"{name} with its max-pooling" if isinstance(one.op, ConvMaxPool) else name
                found.setdefault(one, []).append(words)
    return iter(found.items())
