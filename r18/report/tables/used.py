"""Tables of what users run: the drop-in at its levels, evaluations of photographs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from r18.bench.profile_record import group_name as profile_group
from r18.errors import UsageError
from r18.report.tables.table import MISSING, Row, Table, device_words, heading, needed, record_of

# -- profile -----------------------------------------------------------------------------------


def profile_table(options: Mapping[str, str], folder: Path) -> Table:
    """torchvision's module and the drop-in at each level, by precision and batch.

    CUDA time is shown where there is any, and what an output loses where that was judged.
    """
    device, backend = needed(options, "device"), options.get("backend", "cupy")
    memory = options.get("memory", "contiguous")
    precisions = needed(options, "precisions").split(",")
    batches = [int(batch) for batch in needed(options, "batches").split(",")]
    groups = record_of(folder, "profile", device)["groups"]
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
    "error / allowed",
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
    torch = f"PyTorch {group['environment']['packages']['torch']}"
    return (
        f"{heading(group, [torch])}: the best of {group['repeat']} profiled runs, weights "
        f"{group['weights']['source']}."
    )


# -- evaluate ----------------------------------------------------------------------------------


def evaluate_table(options: Mapping[str, str], folder: Path) -> Table:
    """What evaluations of a folder of photographs came to.

    Images a second are those of the process that asked, reading and decoding included; "done
    before" were kept when the run was interrupted.
    """
    images, network = needed(options, "images"), options.get("network", "resnet18")
    asked = options.get("backends")
    rows: list[Row] = []
    captions: dict[str, None] = {}
    for device in needed(options, "devices").split(","):
        for found in record_of(folder, "evaluate", device)["entries"].values():
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
