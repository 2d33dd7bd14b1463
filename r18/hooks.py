"""Functions that another installed package gives to the core, found by entry point.

The core knows no oracle, but `r18 bench --check` asks one. A package that can answer registers a
function under the entry-point group `r18.hooks`, by the name of the question.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from r18.errors import UsageError

GROUP = "r18.hooks"


def hook(name: str, asked_by: str) -> Any:
    """The function registered by that name.

    asked_by: the command that needs it, for the message. Raises `UsageError` if nothing is
    registered, or if it does not import.
    """
    remedy = "\n  pip install 'r18[oracle]'"
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            try:
                return entry.load()
            except ImportError as error:
                raise UsageError(
                    f"{asked_by} needs the oracle, which does not import: {error}{remedy}"
                ) from None
    raise UsageError(f"{asked_by} needs the oracle, which is not installed{remedy}")
