"""The tally of a kernel: its calls, and how close it came to its bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from r18_oracle.judge.verdict import Judgement


@dataclass
class Tally:
    """Counts of the calls of one kernel, and its largest errors relative to their bounds.

    passed:     checks that passed, by name. refused: refused problems, by reason.
    ratio:      the largest error/bound. sharp: the largest error over its statistical line.
    resolution: the smallest relative error that one run was sure to detect anywhere in its output.
    unjudged:   elements without a verdict.
    """

    problems: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    ratio: float = 0.0
    sharp: float | None = None
    resolution: float | None = None
    unjudged: int = 0

    def include(self, other: Tally) -> None:
        """Add the tally of a choice, without its refusals, which are not the kernel's."""
        self.problems += other.problems
        self.passed += other.passed
        self.ratio = max(self.ratio, other.ratio)
        self.unjudged += other.unjudged
        self.sharp = max((x for x in (self.sharp, other.sharp) if x is not None), default=None)
        known = [x for x in (self.resolution, other.resolution) if x is not None]
        self.resolution = min(known, default=None)

    def note(self, judgement: Judgement) -> None:
        """Add the judgement of one output."""
        self.ratio = max(self.ratio, judgement.ratio)
        self.unjudged += judgement.unjudged
        if judgement.sharp is not None:
            self.sharp = max(self.sharp or 0.0, judgement.sharp)
        if judgement.resolution is not None:
            self.resolution = min(self.resolution or judgement.resolution, judgement.resolution)
