"""Every backend against one float64 reference, checkpoint by checkpoint.

The reference is PyTorch on the CPU, or NumPy where there is no PyTorch, in fp64 on the unfused
schedule. Each other program runs on the same weights and input; the checkpoints are fetched from
both and compared one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from r18.backend import FUSION_LEVELS, Backend, CompileOptions, Program
from r18.errors import UsageError, unknown
from r18.schedule import Schedule
from r18.weights import Weights
from r18_oracle.compare import METRICS, Row, compare, first_bad, short, table
from r18_oracle.dumps import checkpoint_names
from r18_oracle.fixtures import reference_backend
from r18_oracle.images import Images

ATOL = {"fp32": 1e-4, "fp64": 1e-9}
"""Tolerance by precision, each times max(1, max |expected|) of the checkpoint."""


@dataclass(frozen=True)
class Run:
    """One program's checkpoints against the reference's; `error` is what cut it short.

    `backend` is the name that was asked for, `implementation` the one that it gives itself.
    """

    backend: str
    implementation: str
    precision: str
    fusion: str
    rows: tuple[Row, ...]
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and first_bad(self.rows) is None

    def reason(self) -> str:
        """What is wrong, in words."""
        head = f"{self.backend} in {self.precision}, fusion '{self.fusion}'"
        bad = first_bad(self.rows)
        if self.error or bad is None:
            return f"{head}: {self.error or 'no difference'}"
        return f"{head}: first bad checkpoint: {bad.checkpoint} ({bad.comparison.reason()})"

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "implementation": self.implementation,
            "precision": self.precision,
            "fusion": self.fusion,
            "ok": self.ok,
            "error": self.error,
            "checkpoints": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True)
class Verification:
    """All runs. `skipped` says which backend has no kernels for which precision."""

    reference: str
    input: str
    runs: tuple[Run, ...]
    skipped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)

    @property
    def comparisons(self) -> int:
        """Checkpoints that were compared."""
        return sum(len(run.rows) for run in self.runs)

    def closing(self) -> str:
        """The last line."""
        bad = [run for run in self.runs if not run.ok]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            return f"difference: {bad[0].reason()}{more}"
        names = dict.fromkeys([self.reference, *(run.implementation for run in self.runs)])
        count = len({row.checkpoint for run in self.runs for row in run.rows})
        if len(names) == 1:
            return (
                f"{self.reference} agrees with itself on {count} checkpoints; "
                "no second backend was compared"
            )
        return f"{len(names)} backends agree on {count} checkpoints: no difference"

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "reference": self.reference,
            "input": self.input,
            "atol": ATOL,
            "comparisons": self.comparisons,
            "skipped": list(self.skipped),
            "runs": [run.to_json() for run in self.runs],
            "closing": self.closing(),
        }


def verify(
    backends: Mapping[str, Backend],
    schedule: Schedule,
    weights: Weights,
    images: Images,
    *,
    precisions: Sequence[str] = ("fp32", "fp64"),
    fusions: Sequence[str] = ("all",),
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Compare the canonical checkpoints of every backend, precision and fusion level.

    backends:   by the name to show; each must be able to run here.
    precisions: of `ATOL`. A backend without kernels in one is listed in `skipped`.
    progress:   called with what is about to run.

    Whatever a backend raises while it compiles or runs is a failed run, never a skip. Raises
    `UsageError` when nothing could be compared, and what the reference raises.
    """
    for precision in precisions:
        if precision not in ATOL:
            hint = "Others have no tolerance here yet."
            raise unknown("precision to verify", precision, ATOL, hint=hint, error=UsageError)
    for fusion in fusions:
        if fusion not in FUSION_LEVELS:
            raise unknown("fusion level", fusion, FUSION_LEVELS, error=UsageError)
    images.check(schedule)
    question = _Question(schedule, weights, images)
    reference = reference_backend()
    host = (str(reference.probe()), "fp64", "none")
    runs: list[Run] = []
    skipped: list[str] = []
    exact = question.run(reference, "fp64", "none")
    try:
        for (name, backend), precision in product(backends.items(), precisions):
            if precision not in {kernel.precision.name for kernel in backend.kernels()}:
                skipped.append(f"{name} has no kernels in {precision}")
                continue
            for fusion in fusions:
                if type(backend) is type(reference) and host == (
                    str(backend.probe()),
                    precision,
                    fusion,
                ):
                    continue  # the reference would be compared with itself
                if progress is not None:
                    progress(f"{name} in {precision}, fusion '{fusion}'")
                runs.append(question.compare(name, backend, precision, fusion, exact))
    finally:
        exact.close()
    if not runs:
        reasons = "; ".join(skipped) or "no program but the reference itself was asked for"
        raise UsageError(f"nothing was compared, so nothing is verified: {reasons}")
    return Verification(reference.name, images.source, tuple(runs), tuple(skipped))


@dataclass(frozen=True)
class _Question:
    """What every backend is asked."""

    schedule: Schedule
    weights: Weights
    images: Images

    def run(self, backend: Backend, precision: str, fusion: str) -> Program:
        """A program that ran once, with its canonical checkpoints kept."""
        taps = tuple(checkpoint_names(self.schedule))
        options = CompileOptions(self.images.batch, precision, fusion, taps)
        program = backend.compile(self.schedule, self.weights, options)
        program.load(self.images.values)
        program.launch()
        program.synchronize()
        return program

    def compare(
        self, name: str, backend: Backend, precision: str, fusion: str, exact: Program
    ) -> Run:
        """Run it and compare its checkpoints with those of `exact`, one at a time."""
        rows: list[Row] = []
        error = ""
        shapes = self.schedule.shapes(self.images.batch)
        try:
            program = self.run(backend, precision, fusion)
            try:
                for checkpoint in checkpoint_names(self.schedule):
                    found = compare(
                        program.fetch(checkpoint),
                        exact.fetch(checkpoint),
                        ATOL[precision],
                        scaled=True,
                    )
                    shape = shapes[self.schedule.value_of(checkpoint)]
                    rows.append(Row(checkpoint, shape, found))
            finally:
                program.close()
        except Exception as raised:  # a crash is a finding like any other
            error = f"it raised {type(raised).__name__}: {raised}"
        return Run(name, backend.name, precision, fusion, tuple(rows), error)


# -- text --------------------------------------------------------------------------------------


def tolerances(precisions: Sequence[str]) -> str:
    """The tolerances in words."""
    parts = ", ".join(f"{short(ATOL[p])} in {p}" for p in precisions)
    return f"atol {parts}, times max(1, max |expected|)"


def text(verification: Verification) -> str:
    """A table for each backend, what was skipped, and the closing line."""
    parts = []
    for name in dict.fromkeys(run.backend for run in verification.runs):
        runs = [run for run in verification.runs if run.backend == name]
        cells = [
            (
                run.precision,
                run.fusion,
                row.checkpoint,
                *row.comparison.metrics(),
                short(row.comparison.tolerance),
                row.verdict,
            )
            for run in runs
            for row in run.rows
        ]
        heads = ("precision", "fusion", "checkpoint", *METRICS, "tolerance", "verdict")
        lines = [
            name,
            table(heads, cells),
            *(run.reason() for run in runs if run.error),
        ]
        parts.append("\n".join(lines))
    parts += [f"skipped: {reason}" for reason in verification.skipped]
    return "\n\n".join([*parts, verification.closing()])


__all__ = ["ATOL", "Run", "Verification", "text", "tolerances", "verify"]
