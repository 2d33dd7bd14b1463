"""Expected failures: faults that a backend keeps, in a TOML file that is strict.

    [[xfail]]
    test = "test_kernel[mine/conv2d/*]"
    reason = "subnormals are flushed"
    link = "https://example.org/issues/7"

`test` is a glob over the names of the conformance suite's tests: `test_kernel[KERNEL ID]`,
`test_network[BACKEND/PRECISION]` and any other. `r18 verify` applies the entries on kernels and
networks, and leaves the others to the suite. An entry whose test passes is an error in both.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from r18.errors import UsageError, plain, unknown
from r18.files import JSON_LIMIT, read_text

KEYS = ("test", "reason", "link")


@dataclass(frozen=True)
class ExpectedFailure:
    """One entry of the file."""

    test: str
    reason: str
    link: str

    def matches(self, test: str) -> bool:
        """Whether the glob matches a test's name."""
        return fnmatchcase(_literal(test), _literal(self.test))

    def __str__(self) -> str:
        return f"{self.reason} ({self.link})"


def load_expected(path: Path) -> tuple[ExpectedFailure, ...]:
    """The entries of a file. Raises `UsageError` for anything else, and for an unknown key."""
    try:
        data = tomllib.loads(read_text(path, JSON_LIMIT))
    except (OSError, ValueError, RecursionError) as error:  # the last for brackets in brackets
        why = plain(error)
        raise UsageError(f"cannot read the expected failures of {path}: {why}") from None
    _check_keys(path, data, ("xfail",))
    entries = data.get("xfail", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{path}: 'xfail' is not an array of tables: write [[xfail]]")
    for entry in entries:
        _check_keys(path, entry, KEYS)
        if missing := sorted(set(KEYS) - set(entry)):
            raise UsageError(f"{path}: an [[xfail]] lacks {', '.join(missing)}")
        if not all(isinstance(value, str) and value.strip() for value in entry.values()):
            raise UsageError(f"{path}: test, reason and link of an [[xfail]] are texts")
    return tuple(ExpectedFailure(**entry) for entry in entries)


def _check_keys(path: Path, found: dict[str, object], known: tuple[str, ...]) -> None:
    for key in found:
        if key not in known:
            raise UsageError(f"{path}: {unknown('key', key[:200], known)}")


def _literal(name: str) -> str:
    """The name as a glob: pytest's brackets are not a character class."""
    return name.replace("[", "<").replace("]", ">")


__all__ = ["ExpectedFailure", "load_expected"]
