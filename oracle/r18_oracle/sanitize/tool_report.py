"""Reading what compute-sanitizer's tools write."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_LINE = re.compile(r"^=========(?: (?P<text>.*))?$", re.MULTILINE)
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?\b")
_RACES = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
_PLACE = re.compile(
    r"\bat (?:0x[0-9a-f]+ in )?(?:void )?(?P<symbol>[A-Za-z_]\w*)[^+\n]*?(?:\+0x[0-9a-f]+|$)"
)
# Lines that open no report: banners, summaries, and notes about the run.
_NOTES = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Warning:")


@dataclass(frozen=True)
class Complaint:
    """One kind of error in one device function, and how often it was printed."""

    what: str
    function: str
    count: int

    def __str__(self) -> str:
        where = f" in {self.function}" if self.function else ""
        return f"{self.what}{where}" + (f" ({self.count} times)" if self.count > 1 else "")


@dataclass(frozen=True)
class Report:
    """A tool's report on one process.

    errors: the count in its summary, printed or not (for racecheck, hazards). None if there is no
    summary because the process or the tool did not end normally.
    """

    errors: int | None
    complaints: tuple[Complaint, ...]


def parse(text: str) -> Report:
    """Read a tool's log.

    A report is a line that is not indented and the indented lines after it. The first of these that
    names a device function gives the place.
    """
    found: list[list[str]] = []
    for line in _LINE.finditer(text):
        said = line["text"] or ""
        if not said.strip() or said.startswith(_NOTES):
            continue
        if said.startswith(" ") and found:
            found[-1].append(said.strip())
        elif not said.startswith(" "):
            found.append([said.strip()])
    counted = Counter((_headline(report[0]), _function(report)) for report in found)
    complaints = tuple(Complaint(*key, count) for key, count in counted.items())
    totals = [int(number) for pattern in (_SUMMARY, _RACES) for number in pattern.findall(text)]
    return Report(sum(totals) if totals else None, complaints)


def _headline(line: str) -> str:
    """The error without its place: `Race reported between Write access`."""
    return re.split(r" at (?=\S*\+0x|0x)", line.removeprefix("Error: "))[0].rstrip(". ")


def _function(report: list[str]) -> str:
    for line in report:
        if line.startswith(("Host Frame", "Saved host backtrace")):
            break
        place = _PLACE.search(line)
        if place is not None:
            return place["symbol"]
    return ""


__all__ = ["Complaint", "Report", "parse"]
