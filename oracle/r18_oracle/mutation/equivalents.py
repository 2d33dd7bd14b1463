"""Mutants judged equivalent by hand: no valid input distinguishes them from the original.

`equivalent_mutants.json` lists them by backend. An entry has the file, the scope, the line before
and after the change, and the reason, so it stays valid when other code is edited. An entry whose
mutant no longer exists is an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from importlib.resources import files
from typing import Any

from r18.errors import UsageError
from r18_oracle.mutation.mutants import Mutant

Key = tuple[str, str, str, str, int]
FILE = "equivalent_mutants.json"


def listed(backend: str) -> dict[Key, str]:
    """The reasons, by (file, scope, before, after, occurrence); none for an unlisted backend.

    Raises `UsageError` for an entry without a reason, or one that is listed twice.
    """
    text = files("r18_oracle.mutation").joinpath(FILE).read_text("utf-8")
    found: dict[Key, str] = {}
    for entry in json.loads(text).get(backend, []):
        reason = entry["reason"].strip()
        for after in entry["becomes"]:
            where = (entry["file"], entry["scope"], entry["line"], after)
            key = (*where, entry.get("occurrence", 1))
            if key in found or not reason:
                fault = "is listed twice" if reason else "has no reason"
                raise UsageError(f"{FILE}: {entry['file']}, {entry['line']!r} → {after!r} {fault}")
            found[key] = reason
    return found


def judged(
    backend: str, mutants: Iterable[Mutant], files: Collection[str] | None = None
) -> dict[str, str]:
    """The reason for each listed mutant, by its id, given all mutants of the backend.

    files: only entries for these. Raises `UsageError` for entries that match no mutant.
    """
    reasons = {key: why for key, why in listed(backend).items() if files is None or key[0] in files}
    known: dict[Key, list[str]] = {}
    for mutant in mutants:  # one of each kind may have the same key
        known.setdefault(mutant.key, []).append(mutant.id)
    stale = [key for key in reasons if key not in known]
    if stale:
        lines = [f"{file} in {scope or 'the module'}: {a} → {b}" for file, scope, a, b, _ in stale]
        raise UsageError(
            f"{FILE} lists {len(stale)} mutant(s) of '{backend}' that no longer exist; judge the "
            "code again and remove or change the entries:\n  " + "\n  ".join(lines)
        )
    return {name: reason for key, reason in reasons.items() for name in known[key]}


def entry_of(mutant: Mutant) -> dict[str, Any]:
    """An entry of the list for a mutant, with an empty reason."""
    entry: dict[str, Any] = {
        "file": mutant.file,
        "scope": mutant.scope,
        "line": mutant.before,
        "becomes": [mutant.after],
        "reason": "",
    }
    return entry if mutant.occurrence == 1 else entry | {"occurrence": mutant.occurrence}
