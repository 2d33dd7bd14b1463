"""Tables of verdicts: of the oracle on kernels and mutants, and of compute-sanitizer."""

from __future__ import annotations

from pathlib import Path

from r18.errors import UsageError
from r18.report.tables.table import Data, Options, Row, Table, days, listed, needed, record_of


def verify_table(options: Options, folder: Path) -> Table:
    """The verified kernels, by op and algorithm."""
    record = record_of(folder, "verify", needed(options, "device"))
    backend = options.get("backend", "cupy")
    entries = {n: e for n, e in record["kernels"].items() if n.partition("/")[0] == backend}
    if not entries:
        raise UsageError(f"the record of {record['device']} has no kernel of '{backend}'")
    families: dict[tuple[str, str], list[tuple[str, Data]]] = {}
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
    profiles = ", ".join(sorted({entry["profile"] for entry in entries.values()}))
    caption = f"{record['device']}, profile {profiles}, {days(entries.values())}."
    heads = "op | algorithm | precisions | verified | problems | refused | error/bound"
    return Table(heads, "lllrrrr", rows, [caption])


def sanitize_table(options: Options, folder: Path) -> Table:
    """The kernels that each tool of compute-sanitizer ran, and the errors it found."""
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
    caption = f"{record['device']}, {record['sanitizer']}, {days(record['tools'].values())}."
    return Table("tool | kernels | problems | errors | verdict", "lrrrl", rows, [caption])


def perturb_table(options: Options, folder: Path) -> Table:
    """The kernels and programs of each backend that ran with delays, and the findings."""
    record = record_of(folder, "perturb", needed(options, "device"))
    ran: dict[tuple[str, str], list[Data]] = {}
    for what in ("kernels", "programs"):
        for name, one in record[what].items():
            ran.setdefault((name.split("/")[0], what), []).append(one)
    rows = [
        (
            backend,
            what,
            str(len(found)),
            f"{sum(one.get('problems', 0) for one in found):,}" if what == "kernels" else "",
            f"{sum(one['calls'] for one in found):,}",
            str(sum(1 for one in found if one.get("finding") or one.get("broken"))),
        )
        for (backend, what), found in ran.items()
    ]
    (most, *_) = sorted((run["seeds"] for run in record["runs"].values()), reverse=True)
    everything = [one for found in ran.values() for one in found]
    caption = f"{record['device']}, {most} seeds of delays, {days(everything)}."
    return Table("backend | what | number | problems | calls | findings", "llrrrr", rows, [caption])


def mutate_table(options: Options, folder: Path) -> Table:
    """The mutants of each backend, and the share caught."""
    rows: list[Row] = []
    runs: list[Data] = []
    asked = options.get("backends")
    for device in listed(options, "devices"):
        for name, run in record_of(folder, "mutate", device)["backends"].items():
            if asked is None or name in asked.split(","):
                for files, one in {"": run, **run.get("samples", {})}.items():
                    runs.append(one)
                    keys = ("mutants", "killed", "survived", "equivalent", "invalid", "left")
                    counts = (f"{one[key]:,}" for key in keys)
                    what = f"{name}, `{files}`" if files else name
                    tried = one["killed"] + one["survived"]
                    rows.append((what, device, *counts, f"{one['score']:.2f} %" if tried else "—"))
    if not rows:
        raise UsageError(f"no record of {options['devices']} has mutants of '{asked}'")
    heads = (
        "backend | device | mutants | caught | survived | equivalent | do not compile | "
        "not judged yet | caught of tried"
    )
    return Table(heads, "llrrrrrrr", rows, [f"{days(runs)}."])
