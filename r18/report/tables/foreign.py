"""The table of other libraries' kernels, as `r18 check` judged them."""

from __future__ import annotations

from pathlib import Path

from r18.report.tables.table import (
    Data,
    Options,
    Row,
    Table,
    cell,
    days,
    device_words,
    listed,
    record_of,
)

SHORT = "torch.nn.functional."
"""The prefix that is left out of an operator's name."""


def check_table(options: Options, folder: Path) -> Table:
    """Contract found, verdict, search and seconds; a row for each function."""
    rows: list[Row] = []
    captions = []
    for device in listed(options, "devices"):
        record = record_of(folder, "check", device)
        functions = record["functions"]
        rows += [_row(name, entry) for name, entry in functions.items()]
        captions += [_fault(name, entry) for name, entry in functions.items() if not entry["ok"]]
        captions.append(_caption(record))
    heads = (
        "function | library | like | arrays | found | verdict | problems | checks | error/bound"
        " | seconds"
    )
    return Table(heads, "llllllrrrr", rows, captions)


def _row(name: str, entry: Data) -> Row:
    words = "right, as asked" if entry["below"] else "right"
    if not entry["ok"]:
        checks = " ".join(f"`{one['check']}`" for one in entry["findings"])
        what = entry["verdict"].partition(":")[0]
        words = f"**{what}**: {checks}" if checks else f"**{what}**"
    return (
        f"`{name}`",
        entry["library"],
        f"`{entry['operator'].removeprefix(SHORT)}`",
        entry["dtype"],
        f"`{entry['found'] or 'nothing'}`",
        words,
        f"{entry['problems']:,}",
        f"{sum(entry['checks'].values()):,}",
        cell(entry["error_over_bound"], ".3g"),
        cell(entry["seconds"], ".0f"),
    )


def _fault(name: str, entry: Data) -> str:
    """Why a function is wrong, and the worst element of its smallest problem."""
    verdict = entry["verdict"].partition("\n")[0]  # what to give if it is meant comes below
    said = f"`{name}`: {entry['fault'] or verdict}."
    for one in entry["findings"]:
        if one["got"] is not None:
            said += f" Got {one['got']}, float64 gives {one['expected']}."
    return said


def _caption(record: Data) -> str:
    functions, runs = record["functions"], record["runs"]
    used = {device_words(run): None for run in runs.values()}
    profiles = " or ".join(sorted({f"`{run['profile']}`" for run in runs.values()}))
    return (
        f"{' or '.join(used)}, {days(functions.values())}: `r18 check` with the profile "
        f"{profiles}, a process for each function; seconds are of the whole command."
    )


__all__ = ["check_table"]
