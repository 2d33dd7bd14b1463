"""Tables of users' programs: the drop-in at its levels, evaluations of photographs."""

from __future__ import annotations

from pathlib import Path

from r18.bench.profile_record import group_name
from r18.errors import UsageError
from r18.report.tables.table import (
    Data,
    Options,
    Row,
    Table,
    asked_groups,
    cell,
    device_words,
    heading,
    listed,
    needed,
    record_of,
)


def profile_table(options: Options, folder: Path) -> Table:
    """torchvision's module and the drop-in at each level, by precision and batch.

    Columns without any number are left out, such as the CUDA time on a CPU.
    """
    device, backend = needed(options, "device"), options.get("backend", "cupy")
    memory = options.get("memory", "contiguous")

    def name(precision: str, batch: int) -> str:
        return group_name(backend, precision, batch, memory == "channels-last")

    groups = list(asked_groups(record_of(folder, "profile", device)["groups"], options, name))
    rows = [
        (
            row["contender"],
            precision,
            str(batch),
            cell(row["cpu_ms"], ".4g"),
            cell(row["cpu_ratio"], ".2f"),
            cell(row["cuda_ms"], ".4g"),
            cell(row["cuda_ratio"], ".2f"),
            cell(row["loss"], ".3f"),
        )
        for precision, batch, group in groups
        for row in group["rows"]
    ]
    if not rows:
        raise UsageError(
            f"the record of {device} has no profile of '{backend}' in "
            f"{', '.join(listed(options, 'precisions'))}, batch "
            f"{', '.join(listed(options, 'batches'))}, {memory}"
        )
    heads = (
        "fuse | precision | batch | CPU ms | / torchvision | CUDA ms | / torchvision | "
        "error / allowed"
    )
    captions = [profile_caption(group) for _, _, group in groups]
    return Table(heads, "llrrrrrr", rows, captions).without_empty_columns()


def profile_caption(group: Data) -> str:
    """The caption of a profile: device, software, date and number of runs."""
    torch = f"PyTorch {group['environment']['packages']['torch']}"
    return (
        f"{heading(group, [torch])}: the best of {group['repeat']} profiled runs, weights "
        f"{group['weights']['source']}. Each run reads the images of the one before, so the "
        "last-level cache (a GPU's L2) holds what fits of them."
    )


def evaluate_table(options: Options, folder: Path) -> Table:
    """Evaluations of a folder of photographs: agreement and speed.

    Images per second are those of the calling process, with reading and decoding; "done before"
    counts the images kept from an interrupted run.
    """
    images, network = needed(options, "images"), options.get("network", "resnet18")
    asked, precisions = options.get("backends"), options.get("precisions")
    rows: list[Row] = []
    captions: list[str] = []
    for device in listed(options, "devices"):
        for found in record_of(folder, "evaluate", device)["entries"].values():
            if (found["network"], found["folder"]) != (network, images):
                continue
            if precisions is not None and found["precision"] not in precisions.split(","):
                continue
            if asked is None or found["backend"] in asked.split(","):
                captions.append(f"{device_words(found)}, {found['date'][:10]}.")
                rows.append((found["backend"], device, *_evaluated(found)))
    if not rows:
        raise UsageError(
            f"no record of {options['devices']} has an evaluation of '{images}'"
            + (f" with {asked}" if asked else "")
            + (f" in {precisions}" if precisions else "")
        )
    heads = (
        "backend | device | precision | batch | against | images | same class | near ties | "
        "right | ms/image | speedup | workers | images/s | done before"
    )
    return Table(heads, "lllrlrrrrrrrrr", rows, captions)


def quantised_table(options: Options, folder: Path) -> Table:
    """Evaluations in int8: a row for each way to quantise, and its agreement with the reference."""
    device, images = needed(options, "device"), needed(options, "images")
    network, backend = options.get("network", "resnet18"), options.get("backend", "numba-cpu")
    entries = record_of(folder, "evaluate", device)["entries"].values()
    found = [
        (one["quantised"], one)
        for one in entries
        if one.get("quantised")
        and one["precision"] == "int8"
        and (one["network"], one["backend"], one["folder"]) == (network, backend, images)
    ]
    if not found:
        raise UsageError(f"the record of {device} has no evaluation of '{images}' in int8")
    found.sort(key=lambda pair: (-pair[0]["bits"], pair[0]["rounding"], pair[0]["method"]))
    rows = [
        (
            f"int{how['bits']}",
            how["rounding"],
            how["method"],
            f"{how['images']:,}",
            f"{one['against']} {one['against_precision']}",
            f"{one['compared']:,}",
            f"{one['agree_top1']:,}",
            f"{one['agree_top5']:,}",
        )
        for how, one in found
    ]
    heads = (
        "weights | rounding | activations | calibrated on | against | compared | same class | "
        "same five classes"
    )
    captions = [f"{device_words(one)}, {backend}, {one['date'][:10]}." for _, one in found]
    return Table(heads, "lllrlrrr", rows, captions)


def _evaluated(found: Data) -> Row:
    """The cells of an evaluation behind its device."""
    against, right = found["against"], found["accuracy"]
    compared = bool(found["compared"])
    how = found.get("quantised")
    words = f" (W{how['bits']} {how['rounding']}, {how['method']})" if how else ""
    return (
        found["precision"] + words,
        str(found["batch"]),
        "" if against is None else f"{against} {found['against_precision']}",
        f"{found['images']:,}",
        cell(found["agree_top1"] if compared else None, ","),
        cell(found["near_ties"] if compared else None, ","),
        cell(right and right["top1"], ".2%"),
        cell(found["backend_ms"], ".4g"),
        cell(found["speedup"], ".2f"),
        cell(found["workers"], "d"),
        cell(found["images_per_second"], ",.0f"),
        cell(found["resumed"] or None, ","),
    )
