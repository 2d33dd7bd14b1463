"""Tables of what was judged: by the oracle, by compute-sanitizer, and the oracle by mutants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r18.errors import UsageError
from r18.report.tables.table import Row, Table, ends, needed, record_of

# -- verify ------------------------------------------------------------------------------------


def verify_table(options: Mapping[str, str], folder: Path) -> Table:
    """What was verified, by op and algorithm."""
    record = record_of(folder, "verify", needed(options, "device"))
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
    caption = f"{record['device']}, profile {', '.join(profiles)}, {' to '.join(ends(dates))}."
    return Table(heads, "lllrrrr", rows, caption)


# -- sanitize ----------------------------------------------------------------------------------


def sanitize_table(options: Mapping[str, str], folder: Path) -> Table:
    """What each tool of compute-sanitizer looked at, and the errors that it found."""
    record = record_of(folder, "sanitize", needed(options, "device"))
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
    caption = f"{record['device']}, {record['sanitizer']}, {' to '.join(ends(dates))}."
    return Table(("tool", "kernels", "problems", "errors", "verdict"), "lrrrl", rows, caption)


# -- mutate ------------------------------------------------------------------------------------


def mutate_table(options: Mapping[str, str], folder: Path) -> Table:
    """How many mutants of each backend were caught, of those that could be."""
    rows: list[Row] = []
    dates: list[str] = []
    asked = options.get("backends")
    for device in needed(options, "devices").split(","):
        for name, run in record_of(folder, "mutate", device)["backends"].items():
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
    return Table(heads, "llrrrrrrr", rows, f"{' to '.join(ends(sorted(dates)))}.")
