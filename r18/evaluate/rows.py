"""The result of one image, which is a row, and the rows of a batch with its times.

A row holds observations, not conclusions: whether a change of class is a near tie follows
from the margin and the bound of the run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec

from r18.errors import show

TOP = 5
"""How many classes of each image are kept: the most probable ones, of the lower class on ties."""

OK = "ok"
UNREADABLE = "unreadable"
NOT_FINITE = "not finite"
STATUSES = (OK, UNREADABLE, NOT_FINITE)


@dataclass(frozen=True, slots=True)
class Seen:
    """The file that an image was read from: the digest of its bytes, and the system's facts about
    it.

    stamp: size, times of change in nanoseconds (contents, then contents or name), inode.
    """

    sha256: str
    stamp: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One image.

    status:    `ok`; `unreadable`, the image could not be decoded; `not finite`, one of the
               programs put out a NaN or an infinity.
    backend, reference: the `TOP` classes of each, the most probable first; empty without them.
    margin:    how far the reference's first logit is above its second.
    error:     why the status is not `ok`.
    seen:      the file as it was read; None where it could not be opened.
    """

    file: str
    label: int | None
    status: str
    backend: tuple[int, ...] = ()
    reference: tuple[int, ...] = ()
    margin: float | None = None
    error: str = ""
    seen: Seen | None = field(default=None, compare=False)

    @property
    def agree_top1(self) -> bool:
        """Whether the most probable class is the same."""
        return self.status == OK and self.backend[:1] == self.reference[:1]

    @property
    def agree_top5(self) -> bool:
        """Whether the five most probable classes are the same, in any order."""
        return self.status == OK and set(self.backend) == set(self.reference)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Row:
        """The row that JSON data holds. Raises `ValueError` if it holds none."""
        if not isinstance(data, dict) or not data.keys() <= {known.name for known in fields(cls)}:
            raise ValueError(f"{show(data)} is no row")
        row = msgspec.convert(data, cls)
        classes = (*row.backend, *row.reference, *([] if row.label is None else [row.label]))
        sound = (
            row.status in STATUSES
            and all(0 <= index < 1 << 31 for index in classes)
            and max(len(row.backend), len(row.reference)) <= TOP
            and (row.status != OK or row.backend)
            and (row.margin is None or (math.isfinite(row.margin) and row.margin >= 0))
        )
        if not sound:
            raise ValueError(f"{show(data)} is no row")
        return row


@dataclass(frozen=True)
class Times:
    """Milliseconds per image of one batch, of computing only; None without a reference."""

    backend_ms: float
    reference_ms: float | None = None


@dataclass(frozen=True)
class BatchRows:
    """The rows of one batch; without times where none of its images could be read."""

    rows: tuple[Row, ...]
    times: Times | None = None

    def to_json(self) -> dict[str, Any]:
        times = None if self.times is None else asdict(self.times)
        return {"rows": [row.to_json() for row in self.rows], "times": times}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BatchRows:
        """The batch that JSON data holds. Raises `ValueError`, `TypeError` or `KeyError` if it
        holds none."""
        times = data["times"]
        rows = tuple(Row.from_json(row) for row in data["rows"])
        return cls(rows, None if times is None else Times(**times))


__all__ = ["NOT_FINITE", "OK", "STATUSES", "TOP", "UNREADABLE", "BatchRows", "Row", "Seen", "Times"]
