"""The table of libraries' int8 arithmetic: elements by class, a column for each library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from r18.errors import UsageError
from r18.report.tables.table import Data, Options, Row, Table, heading, listed, needed, record_of

CLASSES = (
    "tie",
    "fused or simulated",
    "division or reciprocal",
    "saturation",
    "residual order",
    "pairs in int16",
    "quantised again",
)
"""The classes of elements that `r18 diff --explain` knows."""
UNEXPLAINED = "unexplained"


def explain_table(options: Options, folder: Path) -> Table:
    """Elements that libraries compute differently than specified, by class."""
    network = options.get("network", "resnet18")
    expected = options.get("expected", "numpy")
    entries = record_of(folder, "explain", needed(options, "device"))["entries"]
    found = []
    for peer in (peer.replace("_", ", ") for peer in listed(options, "peers")):
        name = f"{network}/{expected}/{peer}"
        if name not in entries:
            raise UsageError(f"the record holds no '{name}': r18 diff --explain --record writes it")
        found.append(entries[name])

    def row(words: str, number: Callable[[Data], str]) -> Row:
        return (words, *map(number, found))

    def counted(words: str, kind: str | None, logits: bool) -> Row:
        return row(words, lambda entry: f"{_count(entry, kind, logits):,}")

    rows: Sequence[Row] = (
        row("elements", lambda entry: f"{sum(step['elements'] for step in entry['steps']):,}"),
        counted("integers that a step computes differently", None, False),
        *(counted(f"their class: {kind}", kind, False) for kind in CLASSES),
        *(counted(f"logits: {kind}", kind, True) for kind in CLASSES if _seen(found, kind)),
        row("**unexplained**", lambda entry: f"{entry['unexplained']:,}"),
        row("integers moved by at most, in units", _moved),
        row("integers inherited, of the last block", _inherited),
    )
    heads = " | ".join(["", *(entry["got"] for entry in found)])
    captions = [_caption(entry) for entry in found]
    return Table(heads, "l" + "r" * len(found), rows, captions)


def _count(entry: Data, kind: str | None, logits: bool) -> int:
    """Elements of a class, or of all classes, among integers or logits."""
    return sum(
        count
        for step in entry["steps"]
        if step["logits"] is logits
        for name, count in step["classes"].items()
        if kind is None or name == kind
    )


def _seen(entries: Sequence[Data], kind: str) -> bool:
    return any(_count(entry, kind, True) for entry in entries)


def _moved(entry: Data) -> str:
    most = max(step["moved"] for step in entry["steps"] if not step["logits"])
    return f"{most:.2g}"


def _inherited(entry: Data) -> str:
    """The share of the last convolution's elements that are inherited."""
    last = [step for step in entry["steps"] if ".conv" in step["step"]][-1]
    return f"{last['inherited'] / last['elements']:.1%}"


def _caption(entry: Data) -> str:
    name = entry["got"].partition(",")[0]
    versions = entry["environment"]["packages"]
    software = f"{name} {versions[name]}" if name in versions else name
    return f"{heading(entry, [software])}."


__all__ = ["explain_table"]
