"""The summary of an evaluation's rows: agreement, accuracy, near ties, times. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from r18.evaluate.margins import is_tie
from r18.evaluate.rows import OK, UNREADABLE, Row, Times


@dataclass(frozen=True)
class Accuracy:
    """The labelled images: how many have their class first, and among the first five."""

    images: int
    top1: int
    top5: int

    def __str__(self) -> str:
        return f"top-1 {share(self.top1, self.images)}, top-5 {share(self.top5, self.images)}"


@dataclass(frozen=True)
class Summary:
    """An evaluation in numbers.

    images:      rows; `not_read`, which are `unreadable`, could not be decoded.
    compared:    images that both programs were asked about; 0 without a reference.
    agree_top1:  the same class first; agree_top5: the same five classes first, in any order.
    bound:       how far a logit may be from the reference's by rounding; None without one.
    near_ties:   compared images whose first two logits in the reference are at most twice that
                 apart: either class may come out.
    changed:     rows whose class is another one, or that hold no finite logits, and that are no
                 near tie.
    accuracy, reference_accuracy: of the two; None where no image has a label.
    backend_ms, reference_ms: the medians over batches of milliseconds per image, of computing only.
    """

    images: int
    compared: int
    agree_top1: int
    agree_top5: int
    bound: float | None
    near_ties: int
    changed: tuple[Row, ...]
    not_read: tuple[Row, ...]
    accuracy: Accuracy | None
    reference_accuracy: Accuracy | None
    backend_ms: float | None
    reference_ms: float | None

    @property
    def unreadable(self) -> int:
        """How many images could not be decoded."""
        return len(self.not_read)

    @property
    def speedup(self) -> float | None:
        """The reference's time divided by the backend's: above 1 the backend is faster."""
        if self.backend_ms is None or self.reference_ms is None:
            return None
        return self.reference_ms / self.backend_ms

    @property
    def decided(self) -> int:
        """Compared images that are not near ties: the agreement is about these."""
        return self.compared - self.near_ties

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
        for name in ("accuracy", "reference_accuracy"):
            found: Accuracy | None = getattr(self, name)
            plain[name] = found and {
                "images": found.images,
                "top1": found.top1 / found.images,
                "top5": found.top5 / found.images,
            }
        for name in ("changed", "not_read"):
            plain[name] = [row.to_json() for row in getattr(self, name)]
        return plain


PLAIN = (
    "images",
    "unreadable",
    "compared",
    "agree_top1",
    "agree_top5",
    "bound",
    "near_ties",
    "backend_ms",
    "reference_ms",
    "speedup",
)


def summarise(rows: Sequence[Row], times: Sequence[Times], bound: float | None) -> Summary:
    """The summary of the rows of a run and the times of its batches.

    bound: of the run; None without a reference.
    """
    asked = [row for row in rows if row.status != UNREADABLE]
    compared = [] if bound is None else asked
    ties = [row for row in compared if near_tie(row, bound)]
    return Summary(
        images=len(rows),
        compared=len(compared),
        agree_top1=sum(row.agree_top1 for row in compared),
        agree_top5=sum(row.agree_top5 for row in compared),
        bound=bound,
        near_ties=len(ties),
        changed=tuple(row for row in asked if changed(row, bound)),
        not_read=tuple(row for row in rows if row.status == UNREADABLE),
        accuracy=_accuracy(asked, lambda row: row.backend),
        reference_accuracy=(None if bound is None else _accuracy(asked, lambda row: row.reference)),
        backend_ms=_median(times, lambda time: time.backend_ms),
        reference_ms=_median(times, lambda time: time.reference_ms),
    )


def near_tie(row: Row, bound: float | None) -> bool:
    """Whether rounding may have changed the image's class."""
    return bound is not None and row.margin is not None and is_tie(row.margin, bound)


def changed(row: Row, bound: float | None) -> bool:
    """Whether something other than rounding gave the image another class, or no finite logits."""
    if row.status != OK:
        return row.status != UNREADABLE
    return bound is not None and not row.agree_top1 and not near_tie(row, bound)


def share(part: int, whole: int) -> str:
    """`98.20 %`; 100.00 only where it is all."""
    percent = 100 * part / whole
    if part < whole:
        percent = min(percent, 99.99)
    return f"{percent:.2f} %"


def _accuracy(rows: Sequence[Row], classes: Callable[[Row], Sequence[int]]) -> Accuracy | None:
    labelled = [row for row in rows if row.label is not None]
    if not labelled:
        return None
    return Accuracy(
        len(labelled),
        sum(classes(row)[:1] == (row.label,) for row in labelled),
        sum(row.label in classes(row) for row in labelled),
    )


def _median(times: Sequence[Times], of: Callable[[Times], float | None]) -> float | None:
    found = [value for value in map(of, times) if value is not None]
    return statistics.median(found) if found else None


__all__ = ["Accuracy", "Summary", "changed", "near_tie", "share", "summarise"]
