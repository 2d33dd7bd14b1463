"""The request for a demonstration, and the result of each of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """weights: as `load_weights` takes them; "" for ImageNet's if they are cached or are downloaded
    in `DOWNLOAD_SECONDS`, else synthetic ones. backend: a name, as `get_backend` takes it."""

    network: str = "resnet18"
    weights: str = ""
    backend: str = "auto"


@dataclass(frozen=True)
class Part:
    """The result of a part.

    lines: for people. data: the same as plain data. ok: False only if something is wrong; a part
    that needs a package that is not installed says so, and is ok.
    """

    title: str
    lines: tuple[str, ...]
    seconds: float = 0.0
    ok: bool = True
    data: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The title with the seconds, then the lines, indented."""
        body = (f"  {line}".rstrip() for line in self.lines)
        return "\n".join([f"{self.title} ({self.seconds:.1f} s)", *body])

    def to_json(self) -> dict[str, Any]:
        own = {"title": self.title, "seconds": round(self.seconds, 3), "ok": self.ok}
        return {**own, **self.data}


__all__ = ["Part", "Request"]
