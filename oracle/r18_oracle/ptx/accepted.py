"""The violations that are accepted although a rule reports them, each with the reason.

The rules follow paths and not values, so they may report a function that keeps the order in another
way. `accepted.json` lists those of our backends, by name; `r18 ptxcheck --reasons FILE` reads
another list. An entry has the function, the rule and the message, but no lines, so it stays valid
when other code is edited, and covers no other violation of the function. An entry that matches
nothing in its function is an error, because the code must be judged again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec

from r18.errors import UsageError, plain
from r18.files import JSON_LIMIT, read_text
from r18_oracle.ptx.disorder import Disorder

FILE = "accepted.json"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reason for a violation.

    function: the label of the device function, so each tile is judged separately.
    rule, message: as in `Disorder`.
    """

    function: str
    rule: str
    message: str
    reason: str

    def __str__(self) -> str:
        return f"{self.function}: {self.rule}: {self.message}"

    def covers(self, label: str, one: Disorder) -> bool:
        """Whether this is an entry for `one`, found in the function with this label."""
        return (self.function, self.rule, self.message) == (label, one.rule, one.message)


@dataclass(frozen=True)
class Accepted:
    """The entries of a backend, from a file named `name`."""

    name: str
    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, backend: str, path: Path | None = None) -> Accepted:
        """The entries of a backend, from our own list or from the file at `path`.

        Raises `UsageError` for a damaged list, an entry without a function, a rule, a message or a
        reason, and one that is listed twice.
        """
        name = str(path) if path else FILE
        try:
            if path is None:
                text = files("r18_oracle.ptx").joinpath(FILE).read_text("utf-8")
            else:
                text = read_text(path, JSON_LIMIT)
            listed = msgspec.json.decode(text, type=dict[str, list[Entry]])
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            why = plain(str(error))
            raise UsageError(f"cannot read the accepted violations of {name}: {why}") from None
        entries = listed.get(backend, [])
        seen = set()
        for entry in entries:
            for field in entry.__struct_fields__:
                if not getattr(entry, field).strip():
                    raise UsageError(f"{name}: '{plain(str(entry))}' has no {field}")
            key = (entry.function, entry.rule, entry.message)
            if key in seen:
                raise UsageError(f"{name}: '{plain(str(entry))}' is listed twice")
            seen.add(key)
        return cls(name, tuple(entries))

    def entry(self, label: str, one: Disorder) -> Entry | None:
        """The entry for a violation in the function with this label, if there is one."""
        return next((entry for entry in self.entries if entry.covers(label, one)), None)

    def check(
        self,
        backend: str,
        found: Mapping[str, Sequence[Disorder]],
        checked: Collection[str],
        declared: Collection[str],
    ) -> None:
        """Raise `UsageError` for entries that match nothing.

        found: all violations, by label. checked: the labels of the functions that were checked;
        other functions' entries only need a label that is in `declared`.
        """
        stale = [
            entry
            for entry in self.entries
            if not any(entry.covers(entry.function, one) for one in found.get(entry.function, ()))
            and (entry.function in checked or entry.function not in declared)
        ]
        if stale:
            raise UsageError(
                f"{self.name} lists {len(stale)} violation(s) of '{backend}' that were not found; "
                "judge the code again and remove or change the entries:\n  "
                + "\n  ".join(plain(str(entry)) for entry in stale)
            )
