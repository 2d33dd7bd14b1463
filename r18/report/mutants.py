"""Mutants: the outcomes of a mutation run, by file, by check and by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def outcomes(run: Mapping[str, Any]) -> dict[str, str]:
    """The status of every recorded mutant by id; one judged equivalent by hand counts as that."""
    found = {name: str(entry["status"]) for name, entry in run["results"].items()}
    return found | dict.fromkeys(run.get("by_hand", {}), "equivalent")


def by_file(run: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """The number of mutants of each status in each file, and in 'all'."""
    found: dict[str, Counter[str]] = {}
    for name, status in sorted(outcomes(run).items()):
        found.setdefault(name.rsplit(":", 5)[0], Counter())[status] += 1
    return found | {"all": sum(found.values(), Counter())} if found else {}


def survivors(run: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(id, entry) of each surviving mutant."""
    statuses = outcomes(run)
    return [(n, run["results"][n]) for n in sorted(statuses) if statuses[n] == "survived"]


def by_check(run: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The checks that caught mutants, the most frequent first."""
    caught = (one for one in run["results"].values() if one["status"] == "killed")
    return Counter(one["finding"]["check"] for one in caught).most_common()


def by_reason(run: Mapping[str, Any]) -> dict[str, list[str]]:
    """Where the mutants judged equivalent by hand are, by the reason given."""
    found: dict[str, dict[str, None]] = {}
    for name, reason in run.get("by_hand", {}).items():
        found.setdefault(reason, {})[place(name)] = None
    return {reason: list(places) for reason, places in found.items()}


def place(mutant: str) -> str:
    """FILE:LINE of a mutant's id, `FILE:LINE:COLUMN:OPERATOR:INDEX:DIGEST`."""
    return ":".join(mutant.rsplit(":", 5)[:2])


__all__ = ["by_check", "by_file", "by_reason", "outcomes", "place", "survivors"]
