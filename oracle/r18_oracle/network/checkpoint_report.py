"""The report of a comparison of checkpoints: rows, steps, top-1, findings, JSON and text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from tabulate import tabulate

from r18.backend import CompileOptions
from r18.evaluate.margins import Call
from r18.graph.ops import Problem
from r18.graph.schedule import Schedule
from r18_oracle.findings import Finding
from r18_oracle.network.losses import Loss

UNTAPPED = "output (no taps)"
"""The row of the output of a second program, compiled without taps as users do. Taps extend
lifetimes and can hide that buffers with shared memory overwrite each other."""


@dataclass(frozen=True)
class StepError:
    """The worst batch of a step of the plan that was given the reference's values.

    ratio: max(error/bound), above 1 a fault; infinite if the call itself failed.
    sharp: max(error/statistical line), or None if the contract has none; above 1 is a warning.
    check, message: the check that failed ("" if none did) and what is wrong.
    coordinate, got, expected, bound: the worst element; the batch begins at image `first_image`.
    picture: where the error is (`r18_oracle.judge.pictures`), for a step that exceeds its bound.
    """

    step: str
    kernel: str
    problem: Problem
    first_image: int
    ratio: float = math.inf
    sharp: float | None = None
    check: str = ""
    message: str = ""
    coordinate: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    bound: float | None = None
    picture: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return not self.check


@dataclass(frozen=True)
class CheckpointError:
    """One checkpoint over all images.

    value:  the name of its value in the schedule.
    loss:   the propagated error.
    forced: the worst of the steps since the previous checkpoint, None if there are none.
    steps:  the names of those steps.
    """

    name: str
    value: str
    loss: Loss
    forced: StepError | None
    steps: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the loss is allowed; the steps have verdicts of their own."""
        return self.loss.ok


@dataclass(frozen=True)
class TopOne:
    """Top-1 of every image.

    bound: the largest error allowed to the logits. ties: images with a margin of at most twice
    `bound`, where either class is right. wrong: other images with a class unlike the reference's.
    """

    images: int
    bound: float
    ties: tuple[Call, ...]
    wrong: tuple[Call, ...]

    @property
    def decided(self) -> int:
        return self.images - len(self.ties)


@dataclass(frozen=True)
class CheckpointReport:
    """The comparison of a network on a backend with float64.

    checkpoints: in network order, the last one `UNTAPPED`. steps: those of the plan, in its order.
    top1:        None if the schedule has no logits, or they were not requested.
    findings:    the first divergence first. A step that fails on its own comes before a checkpoint
                 that is wrong although all steps are right.
    """

    backend: str
    network: str
    precision: str
    fusion: str
    images: int
    batch: int
    source: str
    multiple: float
    checkpoints: tuple[CheckpointError, ...]
    steps: tuple[StepError, ...]
    top1: TopOne | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        right = all(r.ok for r in self.checkpoints) and all(s.ok for s in self.steps)
        return right and not self.findings and not (self.top1 and self.top1.wrong)

    @property
    def divergence(self) -> Finding | None:
        """The first finding, if any."""
        return self.findings[0] if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """As plain data; problems, NaN and infinities as strings."""
        data = {name: _plain(getattr(self, name)) for name in _SCALARS}
        data["ok"] = self.ok
        data["checkpoints"] = [
            {"name": row.name, "value": row.value, "ok": row.ok, "steps": list(row.steps)}
            | {"forced": None if row.forced is None else row.forced.step}
            | _plain(asdict(row.loss))
            for row in self.checkpoints
        ]
        data["steps"] = [
            {field.name: _plain(getattr(step, field.name)) for field in fields(step)}
            | {"ok": step.ok}
            for step in self.steps
        ]
        data["top1"] = None if self.top1 is None else _plain(asdict(self.top1))
        data["findings"] = [finding.to_json() for finding in self.findings]
        return data


_SCALARS = ("backend", "network", "precision", "fusion", "images", "batch", "source", "multiple")


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Problem():
            return str(value)
        case float() if not math.isfinite(value):
            return str(value)
    return value


# -- findings ----------------------------------------------------------------------------------


def findings_of(
    backend: str,
    schedule: Schedule,
    options: CompileOptions,
    seed: int,
    steps: tuple[StepError, ...],
    rows: tuple[CheckpointError, ...],
) -> tuple[Finding, ...]:
    """Each kernel's first failing step; then the first checkpoint that no failing step explains."""
    network = {
        "network": schedule.name,
        "precision": options.precision,
        "fusion": options.fusion,
    }
    found = []
    blamed: set[str] = set()
    for step in steps:
        if step.ok or step.kernel in blamed:
            continue
        blamed.add(step.kernel)
        found.append(
            Finding(
                check=step.check,
                backend=backend,
                kernel=step.kernel,
                problem=step.problem,
                kind="network",
                seed=seed,
                message=f"step '{step.step}', given the reference's values: {step.message}",
                coordinate=step.coordinate,
                got=step.got,
                expected=step.expected,
                bound=step.bound,
                details=network
                | {"step": step.step, "first_image": step.first_image}
                | ({} if step.picture is None else {"picture": step.picture}),
            )
        )
    for row in rows:
        if row.forced is not None and not row.forced.ok:
            break  # the failing step explains all later checkpoints
        if not row.ok:
            found.append(
                Finding(
                    check="checkpoint",
                    backend=backend,
                    kernel=f"{backend}/program/{options.fusion}/{options.precision}",
                    problem=None,
                    kind="network",
                    seed=seed,
                    message=_explained(row, [step for step in steps if step.step in row.steps]),
                    coordinate=row.loss.coordinate,
                    got=row.loss.got,
                    expected=row.loss.expected,
                    bound=row.loss.allowed_max,
                    details=network | {"checkpoint": row.name, "steps": list(row.steps)},
                )
            )
            break
    return tuple(found)


def _explained(row: CheckpointError, steps: list[StepError]) -> str:
    """The message for a wrong checkpoint whose steps are right."""
    what = f"checkpoint '{row.name}' {row.loss.reason()}"
    if not steps:
        return f"{what}, and there is no step between it and the previous checkpoint"
    sharp = [step for step in steps if step.sharp is not None and step.sharp > 1]
    suspects = ", ".join(f"'{s.step}' ({s.kernel}, {s.sharp:.3g} times)" for s in sharp)
    return (
        f"{what}; each of the {len(steps)} steps since the previous checkpoint keeps its bound "
        "when called on its own, so the fault is in how they are combined (folded weights, fusion, "
        "buffers, order) or is smaller than a bound"
        + (f"; above the statistical line: {suspects}" if suspects else "")
    )


# -- text ------------------------------------------------------------------------------------

HEADS = ("checkpoint", "max abs", "rms", "PyTorch's", "loss", "step's worst", "cosine", "verdict")


def text(report: CheckpointReport) -> str:
    """A table, then top-1. rms and PyTorch's loss are relative to the reference's rms, the
    latter empty where nothing may be lost. `loss` is error/allowed, `step's worst` is error/bound
    since the previous checkpoint."""
    lines = []
    for row in report.checkpoints:
        loss, forced = row.loss, row.forced
        lines.append(
            (
                row.name,
                f"{loss.max_abs:.2e}",
                f"{loss.relative:.2e}",
                f"{loss.own_relative:.2e}" if loss.allowed_max else "",
                f"{loss.ratio:.3f}",
                "" if forced is None else f"{forced.ratio:.3f} {forced.step}",
                f"{loss.cosine:.9f}",
                "ok" if row.ok and (forced is None or forced.ok) else "FAIL",
            )
        )
    align = ("left", *["right"] * 4, "left", "right", "left")
    parts = [tabulate(lines, HEADS, disable_numparse=True, colalign=align)]
    if report.top1 is not None:
        top = report.top1
        agreed = top.decided - len(top.wrong)
        parts.append(
            f"top-1: {agreed} of {top.decided} agree; {len(top.ties)} closer than "
            f"{2 * top.bound:.3g} count as ties"
        )
        for words, calls in (("tie", top.ties), ("WRONG", top.wrong)):
            parts += [
                f"  {words}: image {c.image}, classes {c.first} and {c.second}, "
                f"margin {c.margin:.3g}, got {c.got}"
                for c in calls
            ]
    return "\n".join(parts)


__all__ = [
    "UNTAPPED",
    "CheckpointError",
    "CheckpointReport",
    "StepError",
    "TopOne",
    "findings_of",
    "text",
]
