"""The tables of a document, made from the records.

A table stands between two markers, of which the first says what it is:

    <!-- table: bench devices=nvidia-h200,cpu precisions=fp32 batches=1,64 -->
    <!-- /table -->

bench:    devices, precisions, batches; network (resnet18), fusion (all). Times, and how they
          compare with the peers; a line a contender, precision and batch.
roofline: device; backend (cupy), network, fusion. The network's time beside its floor and beside
          PyTorch's best; a line a precision and batch that was timed.
tuned:    device, precision, batch; backend (cupy), network, before. The time of each kernel that
          `r18 tune` chose beside its floor; `before` is an older table, kept beside the records as
          tuned-<device>-<before>.json.
verify:   device; backend (cupy). What was verified; a line an op and algorithm.
sanitize: device. What compute-sanitizer's tools found.
mutate:   devices; backends (all). What share of the mutants the oracle caught; a line a backend.
profile:  device, precisions, batches; backend (cupy), memory (contiguous, or channels-last). CPU
          and CUDA time of the drop-in at each fusion level; a line a level, precision and batch.
evaluate: devices, images (the folder's name); backends (all), network (resnet18). Agreement with
          the reference on photographs, and how fast; a line a backend, precision, batch and number
          of workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r18 import records, tuning
from r18.bench_record import floors, group_name, in_order, pools
from r18.errors import UsageError, unknown
from r18.ops import ConvMaxPool, Problem
from r18.passes import fuse, fuse_pool
from r18.peers import TORCH
from r18.precision import precision as precision_named
from r18.profile_record import group_name as profile_group
from r18.roofline import WHAT as CEILINGS
from r18.roofline import Ceilings, limit
from r18.schedule import Schedule, network

_BLOCK = re.compile(
    r"^(?P<head><!-- table: (?P<kind>\S+)(?P<options>[^\n]*?) -->\n)(?P<body>.*?)"
    r"^(?P<foot><!-- /table -->)$",
    re.MULTILINE | re.DOTALL,
)
_HEAD = re.compile(r"^<!-- table:", re.MULTILINE)
MISSING = ""
"""A cell for which there is no measurement."""

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table: `align` has `l` or `r` a column, `caption` the line below."""

    heads: Row
    align: str
    rows: Sequence[Row]
    caption: str

    def markdown(self) -> str:
        rules = ["---" if side == "l" else "--:" for side in self.align]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.heads, rules, *self.rows)]
        return "\n".join([*lines, "", self.caption, ""])


def rendered(text: str, folder: Path) -> str:
    """The document with every table made anew from the records in `folder`.

    Raises `UsageError` for a marker that is wrong or has no end, and for a record or a measurement
    that is not there.
    """

    def fill(block: re.Match[str]) -> str:
        options = _options(block["options"])
        if block["kind"] not in TABLES:
            raise unknown("table", block["kind"], TABLES, error=UsageError)
        make, known = TABLES[block["kind"]]
        for name in options:
            if name not in known:
                raise unknown(f"option of table {block['kind']}", name, known, error=UsageError)
        return f"{block['head']}\n{make(options, folder).markdown()}\n{block['foot']}"

    if len(_HEAD.findall(text)) != len(_BLOCK.findall(text)):
        raise UsageError("a table's marker is not followed by its end, <!-- /table -->")
    return _BLOCK.sub(fill, text)


def _options(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not (equals and value):
            raise UsageError(f"a table's options are NAME=VALUE, got '{word}'")
        found[name] = value
    return found


def _record(folder: Path, what: str, device: str) -> dict[str, Any]:
    path = folder / f"{what}-{device}.json"
    if not path.exists():
        command = "roofline --measure" if what == CEILINGS else f"{what} --record"
        raise UsageError(f"there is no record {path}: run r18 {command} on that device")
    return records.read(path, what)


def _one(options: Mapping[str, str], name: str) -> str:
    if name not in options:
        raise UsageError(f"the table's marker does not say {name}=...")
    return options[name]


# -- bench -------------------------------------------------------------------------------------


def bench_table(options: Mapping[str, str], folder: Path) -> Table:
    """Contenders by precision and batch: what took turns stands together.

    Peak memory is shown where there is any: a process on a CPU has one.
    """
    devices = _one(options, "devices").split(",")
    precisions = _one(options, "precisions").split(",")
    batches = [int(batch) for batch in _one(options, "batches").split(",")]
    network, fusion = options.get("network", "resnet18"), options.get("fusion", "all")
    rows: list[Row] = []
    captions: dict[str, None] = {}
    for device in devices:
        groups = _record(folder, "bench", device)["groups"]
        for precision in precisions:
            for batch in batches:
                group = groups.get(group_name(network, precision, fusion, batch))
                if group is None:
                    continue
                captions[bench_caption(group)] = None
                rows += [
                    (row["backend"], device, precision, str(batch), *_measured(row))
                    for row in group["rows"]
                ]
    if not rows:
        raise UsageError(
            f"no record of {', '.join(devices)} has a time of {network} in "
            f"{', '.join(precisions)}, fusion {fusion}, batch {', '.join(map(str, batches))}"
        )
    if all(row[-1] == MISSING for row in rows):
        rows = [row[:-1] for row in rows]
    heads = BENCH_HEADS[: len(rows[0])]
    return Table(heads, ("lll" + "r" * len(heads))[: len(heads)], rows, "<br>\n".join(captions))


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


LIBRARIES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""Packages of which a caption tells the version."""


def device_words(group: Mapping[str, Any]) -> str:
    """What a record's group was timed on: of a CPU the processor and threads, which all share."""
    device = group["environment"]["device"]
    if device["kind"] != "cpu":
        return str(device["name"])
    host = group["machine"]
    key, noun = ("threads", "thread") if "threads" in host else ("cpus", "CPU")
    return f"{host['processor']}, {host[key]} {noun}{'' if host[key] == 1 else 's'}"


def bench_caption(group: Mapping[str, Any]) -> str:
    """Of a record's group: the device, what it was timed with, when, and how often."""
    environment = group["environment"]
    versions = environment["packages"]
    words = [device_words(group)]
    timed = {"torch", *(row["backend"] for row in group["rows"])}
    words += [
        f"{said} {versions[p]}" for p, said in LIBRARIES.items() if p in timed & set(versions)
    ]
    if environment.get("driver"):
        words.append(f"driver {environment['driver']}")
    return (
        f"{', '.join(words)}, {group['date'][:10]}: medians of {group['repeat']} runs after "
        f"{group['warmup']} untimed ones."
    )


# -- roofline ----------------------------------------------------------------------------------


def roofline_table(options: Mapping[str, str], folder: Path) -> Table:
    """How far a backend's network is from its floor, in every cell that the record has.

    The floor is the sum over the steps, of those that the program has: with the pooled stem where
    it pools. It is left out where no rate of the precision was measured.
    """
    device, backend = _one(options, "device"), options.get("backend", "cupy")
    asked = {"network": options.get("network", "resnet18"), "fusion": options.get("fusion", "all")}
    ceilings = Ceilings.from_record(_record(folder, CEILINGS, device))
    rows: list[Row] = []
    captions = {_ceilings_words(ceilings): None}
    for group in in_order(_record(folder, "bench", device)["groups"]):
        own = next((row for row in group["rows"] if row["backend"] == backend), None)
        if own is None or any(group[key] != value for key, value in asked.items()):
            continue
        captions[bench_caption(group)] = None
        floor = None
        if group["precision"] in ceilings.rates:
            steps = floors(group, ceilings, pooled=pools(own)).values()
            floor = sum(step.floor_ms for step in steps)
        rows.append((group["precision"], str(group["batch"]), *_beside(group, own, floor)))
    if not rows:
        raise UsageError(f"the record of {device} has no time of '{backend}' for {asked}")
    return Table(ROOFLINE_HEADS, "lrrrrrlr", rows, "<br>\n".join(captions))


ROOFLINE_HEADS = (
    *("precision", "batch", "floor ms", "measured ms", "measured / floor"),
    *("best PyTorch ms", "its mode", "PyTorch / r18"),
)


def _beside(group: Mapping[str, Any], own: Mapping[str, Any], floor: float | None) -> Iterator[str]:
    """The cells behind a batch: a row's median beside its floor and PyTorch's least."""
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
    device, name = _one(options, "device"), _one(options, "precision")
    size, before = _one(options, "batch"), options.get("before")
    if not size.isdecimal() or int(size) < 1:
        raise UsageError(f"the table's marker says batch={size}, which is no number of images")
    batch, backend = int(size), options.get("backend", "cupy")
    ceilings = Ceilings.from_record(_record(folder, CEILINGS, device))
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


def _tuned(path: Path) -> tuning.Table:
    if not path.is_file():
        raise UsageError(f"there is no tuning table {path}: r18 tune --out writes one")
    return tuning.read_table(path)


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


# -- verify ------------------------------------------------------------------------------------


def verify_table(options: Mapping[str, str], folder: Path) -> Table:
    """What was verified, by op and algorithm."""
    record = _record(folder, "verify", _one(options, "device"))
    backend = options.get("backend", "cupy")
    entries = {n: e for n, e in record["kernels"].items() if n.partition("/")[0] == backend}
    if not entries:
        raise UsageError(f"the record of {record['device']} has no kernel of '{backend}'")
    families: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for name, entry in entries.items():
        _, op, algorithm, precision, *_ = name.split("/")
        families.setdefault((op, algorithm), []).append((precision, entry))
    rows = [
        (
            op,
            algorithm,
            " ".join(dict.fromkeys(precision for precision, _ in members)),
            f"{sum(e['verified'] for _, e in members)} of {len(members)}",
            f"{sum(e['problems'] for _, e in members):,}",
            f"{sum(sum(e['refused'].values()) for _, e in members):,}",
            f"{max(e['error_over_bound'] for _, e in members):.3g}",
        )
        for (op, algorithm), members in sorted(families.items())
    ]
    heads = ("op", "algorithm", "precisions", "verified", "problems", "refused", "error/bound")
    dates = sorted({entry["date"][:10] for entry in entries.values()})
    profiles = sorted({entry["profile"] for entry in entries.values()})
    caption = f"{record['device']}, profile {', '.join(profiles)}, {' to '.join(_ends(dates))}."
    return Table(heads, "lllrrrr", rows, caption)


def _ends(items: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((items[0], items[-1])))


# -- sanitize ----------------------------------------------------------------------------------


def sanitize_table(options: Mapping[str, str], folder: Path) -> Table:
    """What each tool of compute-sanitizer looked at, and the errors that it found."""
    record = _record(folder, "sanitize", _one(options, "device"))
    rows = [
        (
            tool,
            str(len(found["kernels"])),
            f"{sum(kernel['problems'] for kernel in found['kernels'].values()):,}",
            str(found["errors"]),
            found["verdict"],
        )
        for tool, found in record["tools"].items()
    ]
    dates = sorted({found["date"][:10] for found in record["tools"].values()})
    caption = f"{record['device']}, {record['sanitizer']}, {' to '.join(_ends(dates))}."
    return Table(("tool", "kernels", "problems", "errors", "verdict"), "lrrrl", rows, caption)


# -- mutate ------------------------------------------------------------------------------------


def mutate_table(options: Mapping[str, str], folder: Path) -> Table:
    """How many mutants of each backend were caught, of those that could be."""
    rows: list[Row] = []
    dates: list[str] = []
    asked = options.get("backends")
    for device in _one(options, "devices").split(","):
        for name, run in _record(folder, "mutate", device)["backends"].items():
            if asked is not None and name not in asked.split(","):
                continue
            dates.append(run["date"][:10])
            numbers = [run[key] for key in ("mutants", "killed", "survived", "equivalent")]
            numbers += [run["invalid"], run["left"]]
            rows.append((name, device, *(f"{n:,}" for n in numbers), f"{run['score']:.2f} %"))
    if not rows:
        raise UsageError(f"no record of {options['devices']} has mutants of '{asked}'")
    heads = (
        *("backend", "device", "mutants", "caught", "survived", "equivalent", "do not compile"),
        *("not judged yet", "caught of tried"),
    )
    return Table(heads, "llrrrrrrr", rows, f"{' to '.join(_ends(sorted(dates)))}.")


# -- profile -----------------------------------------------------------------------------------


def profile_table(options: Mapping[str, str], folder: Path) -> Table:
    """torchvision's module and the drop-in at each level, by precision and batch.

    CUDA time is shown where there is any, and what an output loses where that was judged.
    """
    device, backend = _one(options, "device"), options.get("backend", "cupy")
    memory = options.get("memory", "contiguous")
    precisions = _one(options, "precisions").split(",")
    batches = [int(batch) for batch in _one(options, "batches").split(",")]
    groups = _record(folder, "profile", device)["groups"]
    rows: list[Row] = []
    captions: dict[str, None] = {}
    for precision in precisions:
        for batch in batches:
            found = groups.get(profile_group(backend, precision, batch, memory == "channels-last"))
            if found is None:
                continue
            captions[profile_caption(found)] = None
            for row in found["rows"]:
                head = (row["contender"], precision, str(batch))
                rows.append((*head, *_profiled(row)))
    if not rows:
        raise UsageError(
            f"the record of {device} has no profile of '{backend}' in {', '.join(precisions)}, "
            f"batch {', '.join(map(str, batches))}, {memory}"
        )
    kept = [at for at in range(len(PROFILE_HEADS)) if any(row[at] != MISSING for row in rows)]
    rows = [[row[at] for at in kept] for row in rows]
    heads = [PROFILE_HEADS[at] for at in kept]
    return Table(heads, ("ll" + "r" * len(heads))[: len(heads)], rows, "<br>\n".join(captions))


PROFILE_HEADS = (
    *("fuse", "precision", "batch", "CPU ms", "/ torchvision", "CUDA ms", "/ torchvision"),
    "of what it may lose",
)


def _profiled(row: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a contender behind its batch."""
    for kind in ("cpu", "cuda"):
        ms, ratio = row[f"{kind}_ms"], row[f"{kind}_ratio"]
        yield MISSING if ms is None else f"{ms:.4g}"
        yield MISSING if ratio is None else f"{ratio:.2f}"
    yield MISSING if row["loss"] is None else f"{row['loss']:.3f}"


def profile_caption(group: Mapping[str, Any]) -> str:
    """Of a record's group: the device, what it was profiled with, when, and how often."""
    environment = group["environment"]
    words = [device_words(group), f"PyTorch {environment['packages']['torch']}"]
    if environment.get("driver"):
        words.append(f"driver {environment['driver']}")
    return (
        f"{', '.join(words)}, {group['date'][:10]}: the best of {group['repeat']} profiled runs, "
        f"weights {group['weights']['source']}."
    )


# -- evaluate ----------------------------------------------------------------------------------


def evaluate_table(options: Mapping[str, str], folder: Path) -> Table:
    """What evaluations of a folder of photographs came to.

    Images a second are those of the process that asked, reading and decoding included; "done
    before" were kept when the run was interrupted.
    """
    images, network = _one(options, "images"), options.get("network", "resnet18")
    asked = options.get("backends")
    rows: list[Row] = []
    captions: dict[str, None] = {}
    for device in _one(options, "devices").split(","):
        for found in _record(folder, "evaluate", device)["entries"].values():
            if (found["network"], found["folder"]) != (network, images):
                continue
            if asked is not None and found["backend"] not in asked.split(","):
                continue
            captions[_evaluate_caption(found)] = None
            rows.append((found["backend"], device, *_evaluated(found)))
    if not rows:
        raise UsageError(
            f"no record of {options['devices']} has an evaluation of '{images}'"
            + (f" with {asked}" if asked else "")
        )
    return Table(EVALUATE_HEADS, "lllrlrrrrrrrrr", rows, "<br>\n".join(captions))


EVALUATE_HEADS = (
    *("backend", "device", "precision", "batch", "against", "images", "same class", "near ties"),
    *("right", "ms/image", "speedup", "workers", "images/s", "done before"),
)


def _evaluated(found: Mapping[str, Any]) -> Iterator[str]:
    """The cells of an evaluation behind its device."""
    against = found["against"]
    yield found["precision"]
    yield str(found["batch"])
    yield MISSING if against is None else f"{against} {found['against_precision']}"
    yield f"{found['images']:,}"
    yield MISSING if not found["compared"] else f"{found['agree_top1']:,}"
    yield MISSING if not found["compared"] else f"{found['near_ties']:,}"
    right = found["accuracy"]
    yield MISSING if right is None else f"{right['top1']:.2%}"
    for number, form in (("backend_ms", ".4g"), ("speedup", ".2f")):
        yield MISSING if found[number] is None else f"{found[number]:{form}}"
    yield MISSING if found["workers"] is None else str(found["workers"])
    rate = found["images_per_second"]
    yield MISSING if rate is None else f"{rate:,.0f}"
    yield f"{found['resumed']:,}" if found["resumed"] else MISSING


def _evaluate_caption(found: Mapping[str, Any]) -> str:
    return f"{device_words(found)}, {found['date'][:10]}."


TABLES: dict[str, tuple[Callable[[Mapping[str, str], Path], Table], tuple[str, ...]]] = {
    "bench": (bench_table, ("devices", "precisions", "batches", "network", "fusion")),
    "roofline": (roofline_table, ("device", "backend", "network", "fusion")),
    "tuned": (tuned_table, ("device", "precision", "batch", "backend", "network", "before")),
    "verify": (verify_table, ("device", "backend")),
    "sanitize": (sanitize_table, ("device",)),
    "mutate": (mutate_table, ("devices", "backends")),
    "evaluate": (evaluate_table, ("devices", "images", "backends", "network")),
    "profile": (profile_table, ("device", "precisions", "batches", "backend", "memory")),
}
"""How each is made, and the options that its marker may have."""


__all__ = [
    "Table",
    "bench_caption",
    "bench_table",
    "device_words",
    "evaluate_table",
    "mutate_table",
    "profile_caption",
    "profile_table",
    "rendered",
    "roofline_table",
    "sanitize_table",
    "tuned_table",
    "verify_table",
]
