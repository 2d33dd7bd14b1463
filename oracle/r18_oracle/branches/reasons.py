"""The branches and device functions that problems may leave out, each with the reason.

`reasons.json` lists those of our backends, by name; `r18 branches --reasons FILE` reads another
list. An entry has the file, the scope and the text of the line, so it stays valid when other code
is edited. An entry whose line no longer exists is an error, because the code must be judged again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec

from r18.errors import UsageError, plain
from r18.files import JSON_LIMIT, read_text
from r18_oracle.branches.untaken import EXIT, Source, Untaken

FILE = "reasons.json"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reason for a line of host code, or for a device function.

    file, scope, line: as in `Untaken`; the line of a function that is never called is its `def`.
    to:       the text of the line that the branch leads to, or `exit`; empty for every branch of
              the line.
    function: the label of a device function, instead of a line.
    """

    reason: str
    file: str = ""
    scope: str = ""
    line: str = ""
    to: str = ""
    function: str = ""

    def __str__(self) -> str:
        if self.function:
            return f"device function {self.function}"
        more = f" → {self.to}" if self.to else ""
        return f"{self.file}, {self.scope}: {self.line}{more}"

    def covers(self, one: Untaken) -> bool:
        """Whether this is an entry for `one`."""
        named = (self.file, self.scope, self.line or self.function)
        return named == (one.file, one.scope, one.text) and self.to in ("", one.to_text)

    def stands(self, sources: Mapping[str, Source], labels: Collection[str]) -> bool:
        """Whether its line, or its device function, still exists."""
        if self.function:
            return self.function in labels
        if self.file not in sources:
            return False
        texts = sources[self.file].texts(self.scope)
        return self.line in texts and (self.to in ("", EXIT) or self.to in texts)


@dataclass(frozen=True)
class Reasons:
    """The entries of a backend, from a file named `name`."""

    name: str
    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, backend: str, path: Path | None = None) -> Reasons:
        """The entries of a backend, from our own list or from the file at `path`.

        Raises `UsageError` for a damaged list, an entry without a reason, one that has not exactly
        one of a line and a function, and one that is listed twice.
        """
        name = str(path) if path else FILE
        try:
            if path is None:
                text = files("r18_oracle.branches").joinpath(FILE).read_text("utf-8")
            else:
                text = read_text(path, JSON_LIMIT)
            listed = msgspec.json.decode(text, type=dict[str, list[Entry]])
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise UsageError(f"cannot read the reasons of {name}: {plain(str(error))}") from None
        entries = listed.get(backend, [])
        seen = set()
        for entry in entries:
            key = (entry.file, entry.scope, entry.line, entry.to, entry.function)
            if key in seen:
                raise UsageError(f"{name}: '{plain(str(entry))}' is listed twice")
            if not entry.reason.strip():
                raise UsageError(f"{name}: '{plain(str(entry))}' has no reason")
            if bool(entry.function) == bool(entry.file and entry.scope and entry.line):
                raise UsageError(
                    f"{name}: an entry needs a file, a scope and a line, or else a function; the "
                    f"one with the reason '{plain(entry.reason)}' has neither or both"
                )
            seen.add(key)
        return cls(name, tuple(entries))

    def check(self, backend: str, sources: Mapping[str, Source], labels: Collection[str]) -> None:
        """Raise `UsageError` for entries whose line or device function no longer exists."""
        stale = [entry for entry in self.entries if not entry.stands(sources, labels)]
        if stale:
            raise UsageError(
                f"{self.name} lists {len(stale)} line(s) or function(s) of '{backend}' that no "
                "longer exist; judge the code again and remove or change the entries:\n  "
                + "\n  ".join(plain(str(entry)) for entry in stale)
            )

    def of_each(self, untaken: Iterable[Untaken]) -> dict[Untaken, Entry | None]:
        """The entry for each branch, line or function; None for those without a reason."""
        return {one: next((e for e in self.entries if e.covers(one)), None) for one in untaken}
