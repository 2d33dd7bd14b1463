"""Step fixtures: a slice of the network with a seeded input and its expected output, as files.

| step | slice                            |
|------|----------------------------------|
| 2    | conv1, bn1, relu                 |
| 3–6  | layer1, layer2, layer3, layer4   |
| 7    | global average, fc, softmax      |

A fixture is a folder with `input.bin`, `expected.bin` and `fixture.json`. The expected output is
computed in float64 by a reference backend and rounded once, to float32; both files hold raw
little-endian float32, so that a program in any language can run the step.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from r18.backend import Array, Backend, CompileOptions, StepTime
from r18.backend.registry import get_backend
from r18.errors import BackendUnavailable, DumpError, UsageError, plain, unknown
from r18.graph.resnet import network
from r18.graph.schedule import IMAGE, Schedule
from r18.weights import Weights, load_weights
from r18.weights.precisions import CALIBRATED
from r18.weights.sources import check_source_named
from r18_oracle.dumps.dumps import Dump, write_dump
from r18_oracle.dumps.files import (
    Origin,
    TensorFile,
    check_free,
    field,
    read_json,
    read_tensor,
    reading,
    tensor_file,
    whole_folder,
    write_json,
    write_tensor,
)
from r18_oracle.judge.compare import METRICS, Comparison, compare, short, table
from r18_oracle.network.images import Images, seeded

DESCRIPTION = "fixture.json"
TOLERANCE = 1e-4

STEPS: dict[int, tuple[str, str]] = {
    2: (IMAGE, "relu"),
    3: ("stem_pool", "layer1"),
    4: ("layer1", "layer2"),
    5: ("layer2", "layer3"),
    6: ("layer3", "layer4"),
    7: ("layer4", "softmax"),
}
"""The checkpoint or value that each step starts from, and the one that it ends with."""

REFERENCES = ("r18_torch:cpu", "numpy")
"""Backends that expected values may come from, the first that can run; always in fp64."""


def reference_backend(name: str | None = None) -> Backend:
    """The backend of that name, or the first of `REFERENCES` that can run here.

    Raises `UnknownName`, and `BackendUnavailable` when none can run.
    """
    if name is not None:
        return get_backend(name)
    causes = []
    for candidate in REFERENCES:
        try:
            return get_backend(candidate)
        except BackendUnavailable as error:
            causes.append(f"{candidate}: {error.cause}")
    raise BackendUnavailable("reference", "; ".join(causes), "pip install 'r18[torch]'")


def _check_step(step: int) -> None:
    if step not in STEPS:
        raise unknown("step", str(step), map(str, STEPS))


def check_precision(precision: str) -> None:
    """Raise `UsageError` for one of `CALIBRATED`: its scales are those of a whole network."""
    if precision in CALIBRATED:
        raise UsageError(
            f"a step cannot run in {precision}: fixtures are of float networks, and {precision} "
            "takes a quantised one\n"
            f"  compare two backends instead: `r18 dump --precision {precision}` with each, and "
            "then `r18 diff`"
        )


def step_schedule(step: int, network_name: str = "resnet18") -> Schedule:
    """The slice of a network that a step computes. Raises `UnknownName`."""
    _check_step(step)
    first, last = STEPS[step]
    return network(network_name, softmax=last == "softmax").between(first, last)


@dataclass(frozen=True)
class Fixture:
    """A step's input and expected output, in a folder."""

    folder: Path
    step: int
    network: str
    seed: int
    weights: Origin
    reference: str
    tolerance: float
    input: TensorFile
    expected: TensorFile

    @property
    def schedule(self) -> Schedule:
        """The slice. Raises `UnknownName` for a step or network that is not known here."""
        return step_schedule(self.step, self.network)

    def read_input(self) -> Array:
        """(N, …) float32. Raises `DumpError`."""
        return read_tensor(self.folder, self.input)

    def read_expected(self) -> Array:
        """(N, …) float32. Raises `DumpError`."""
        return read_tensor(self.folder, self.expected)


# -- making and reading ------------------------------------------------------------------------


def check_places(steps: Iterable[int], folder: Path, *, overwrite: bool = False) -> None:
    """Check that each step's fixture may be written to `folder/stepN`.

    A set is checked before its first fixture is made: half of one would block the next attempt.
    Raises `UnknownName` for a step that does not exist, and `DumpError`.
    """
    for step in steps:
        _check_step(step)
        check_free(folder / f"step{step}", "fixture", DESCRIPTION, overwrite)


def make_fixture(
    step: int,
    weights: Weights,
    folder: str | Path,
    *,
    network_name: str = "resnet18",
    seed: int = 0,
    batch: int = 1,
    reference: Backend | None = None,
    overwrite: bool = False,
) -> Fixture:
    """Compute a step in float64 and write its fixture, whole or not at all.

    The input is that of `seeded`; `weights` are the whole network's. Raises `DumpError`,
    `UnknownName`, `UsageError`, and what compiling raises.
    """
    folder = Path(folder)
    schedule = step_schedule(step, network_name)
    images = seeded(schedule, batch, seed)
    backend = reference or reference_backend()
    check_free(folder, "fixture", DESCRIPTION, overwrite)
    options = CompileOptions(batch=batch, precision="fp64", fusion="none")
    program = backend.compile(schedule, weights, options)
    try:
        expected = program(images.values)
    finally:
        program.close()
    with whole_folder(folder, "fixture", DESCRIPTION, overwrite) as draft:
        fixture = Fixture(
            folder=folder,
            step=step,
            network=network_name,
            seed=seed,
            weights=Origin(weights.source, weights.sha256),
            reference=f"{backend.name} in fp64 on {backend.probe()}",
            tolerance=TOLERANCE,
            input=write_tensor(draft, "input", images.values),
            expected=write_tensor(draft, "expected", expected, "float32"),
        )
        write_json(draft / DESCRIPTION, "fixture", _to_json(fixture))
    return fixture


def _to_json(fixture: Fixture) -> dict[str, Any]:
    return {
        "step": fixture.step,
        "network": fixture.network,
        "slice": list(STEPS[fixture.step]),
        "steps": [step.name for step in fixture.schedule.steps],
        "seed": fixture.seed,
        "weights": asdict(fixture.weights),
        "reference": fixture.reference,
        "tolerance": fixture.tolerance,
        "input": fixture.input.to_json(),
        "expected": fixture.expected.to_json(),
    }


def read_fixture(folder: str | Path) -> Fixture:
    """The fixture in a folder; reads no tensor. Raises `DumpError`."""
    folder = Path(folder)
    path = folder / DESCRIPTION
    if not path.exists():
        raise DumpError(
            f"'{folder}' holds no {DESCRIPTION}, so it is no fixture; `r18 fixtures` writes them"
        )
    data = read_json(path, "fixture")
    with reading(path):
        fixture = Fixture(
            folder=folder,
            step=field(data, "step", int),
            network=field(data, "network", str),
            seed=field(data, "seed", int),
            weights=Origin.from_json(field(data, "weights", dict)),
            reference=field(data, "reference", str),
            tolerance=field(data, "tolerance", float),
            input=tensor_file(field(data, "input", dict)),
            expected=tensor_file(field(data, "expected", dict)),
        )
        schedule = fixture.schedule
        if not fixture.input.shape:
            name = plain(fixture.input.name)
            raise DumpError(f"'{name}' has no axes, and the first is the batch")
        batch = fixture.input.shape[0]
        shapes = schedule.shapes(batch)
        for file, value in ((fixture.input, schedule.input), (fixture.expected, schedule.output)):
            if file.shape != shapes[value]:
                raise DumpError(
                    f"'{plain(file.name)}' has shape {file.shape}, step {fixture.step} of "
                    f"{fixture.network} at batch {batch} has {shapes[value]}"
                )
        if not (math.isfinite(fixture.tolerance) and fixture.tolerance >= 0):
            raise DumpError(f"the tolerance is {fixture.tolerance}")
    return fixture


def find_fixture(folder: str | Path, step: int) -> Path:
    """The folder of a step's fixture: `folder` if it is a fixture itself, else `folder/stepN`."""
    folder = Path(folder)
    return folder if (folder / DESCRIPTION).exists() else folder / f"step{step}"


def fixture_for(
    step: int,
    asked: Path | None,
    default: Path,
    network_name: str | None,
    source: str | Path | None,
    tell: Callable[[str], None],
) -> tuple[Fixture, Weights]:
    """The fixture of a step and the weights to run it with.

    asked:  its folder, or one that holds it as stepN; None is `default`, where it is made if it is
            missing. network_name, source: None is the fixture's own. tell: called with a line
            before a fixture is made.

    Raises `UnknownName` for a step that does not exist, `DumpError` for a fixture of another step
    or network, and what reading and loading raise.
    """
    _check_step(step)
    folder = find_fixture(asked or default, step)
    if asked is None and not (folder / DESCRIPTION).exists():
        tell(f"no fixture in {folder} yet: making it")
        name = network_name or "resnet18"
        weights = load_weights(source or "synthetic", network(name))
        return make_fixture(step, weights, folder, network_name=name), weights
    found = read_fixture(folder)
    for what, wanted, has in (
        ("step", step, found.step),
        ("network", network_name or found.network, found.network),
    ):
        if wanted != has:
            raise DumpError(
                f"the fixture '{folder}' is of {what} {plain(has)}, asked for {wanted}\n"
                "  name another with --fixture, or write one with `r18 fixtures --outdir`"
            )
    if source is None:
        check_source_named(found.weights.source, f"the fixture '{folder}'")
        source = found.weights.source
    return found, load_weights(source, network(found.network))


def make_e2e(
    folder: str | Path,
    schedule: Schedule,
    weights: Weights,
    images: Images,
    *,
    reference: Backend | None = None,
    overwrite: bool = False,
) -> Dump:
    """A dump of the canonical checkpoints in float64 by the reference, rounded once to float32.

    With its `input.bin` it is the end-to-end fixture for a program in any language. Raises what
    `write_dump` raises.
    """
    return write_dump(
        folder,
        reference or reference_backend(),
        schedule,
        weights,
        images,
        options=CompileOptions(precision="fp64", fusion="none"),
        dtype="float32",
        overwrite=overwrite,
    )


# -- running -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """A step run by a backend: how right, and how fast."""

    fixture: Fixture
    backend: str
    device: str
    precision: str
    times: tuple[StepTime, ...]
    comparison: Comparison

    @property
    def ok(self) -> bool:
        return self.comparison.ok

    @property
    def milliseconds(self) -> float:
        """All stages together."""
        return sum(time.milliseconds for time in self.times)

    def text(self) -> str:
        """The text of a run: its stages with milliseconds, the metrics and the verdict."""
        fixture, c = self.fixture, self.comparison
        first, last = STEPS[fixture.step]
        stages = [(t.step, t.kernel, f"{t.milliseconds:.3f}") for t in self.times]
        stages.append(("total", "", f"{self.milliseconds:.3f}"))
        verdict = f"[OK] within atol {short(c.tolerance)}" if self.ok else f"[FAIL] {c.reason()}"
        return "\n".join(
            [
                f"step {fixture.step} of {fixture.network}: {first} to {last}, "
                f"batch {fixture.input.shape[0]}, weights {fixture.weights.source}",
                f"{self.backend} in {self.precision}, {self.device}",
                "",
                table(("stage", "kernel", "ms"), stages),
                "",
                "  ".join(f"{m} {v}" for m, v in zip(METRICS, c.metrics(), strict=True)),
                verdict,
            ]
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.fixture.step,
            "network": self.fixture.network,
            "backend": self.backend,
            "device": self.device,
            "precision": self.precision,
            "milliseconds": self.milliseconds,
            "stages": [asdict(time) for time in self.times],
            **self.comparison.to_json(),
        }


def run_step(
    fixture: Fixture,
    backend: Backend,
    weights: Weights,
    *,
    precision: str = "fp32",
    fusion: str = "none",
    atol: float | None = None,
    repeat: int = 5,
) -> StepResult:
    """Run a fixture's step and compare the output with what is expected.

    atol:   instead of the fixture's tolerance.
    repeat: profiled runs after the first; each stage's time is their median.

    Raises `DumpError` for a damaged fixture, or one that was made with other weights, `UsageError`
    for int8 and fp8, and what compiling raises.
    """
    check_precision(precision)
    if repeat < 1:
        raise UsageError(f"repeat must be at least 1, got {repeat}")
    if weights.sha256 != fixture.weights.sha256:
        again = shlex.join(
            [
                *("r18", "fixtures", "--network", fixture.network, "--weights", weights.source),
                *("--steps", str(fixture.step), "--batch", str(fixture.input.shape[0])),
                *("--seed", str(fixture.seed), "--outdir", str(fixture.folder.parent), "--force"),
            ]
        )
        raise DumpError(
            f"the fixture '{fixture.folder}' was made with other weights: {fixture.weights.source} "
            f"(sha256 {fixture.weights.sha256[:16]}…), these are {weights.source} (sha256 "
            f"{weights.sha256[:16]}…)\n"
            f"  run it with --weights {fixture.weights.source}, or make it again with `{again}`"
        )
    images, expected = fixture.read_input(), fixture.read_expected()
    options = CompileOptions(batch=len(images), precision=precision, fusion=fusion)
    program = backend.compile(fixture.schedule, weights, options)
    try:
        got = program(images)
        runs = [program.profile() for _ in range(repeat)]
    finally:
        program.close()
    tolerance = fixture.tolerance if atol is None else atol
    return StepResult(
        fixture=fixture,
        backend=backend.name,
        device=str(backend.probe()),
        precision=precision,
        times=_median(runs),
        comparison=compare(got, expected, tolerance),
    )


def _median(runs: Sequence[Sequence[StepTime]]) -> tuple[StepTime, ...]:
    return tuple(
        replace(stage[0], milliseconds=statistics.median(t.milliseconds for t in stage))
        for stage in zip(*runs, strict=True)
    )


__all__ = [
    "DESCRIPTION",
    "STEPS",
    "TOLERANCE",
    "Fixture",
    "StepResult",
    "check_places",
    "check_precision",
    "find_fixture",
    "fixture_for",
    "make_e2e",
    "make_fixture",
    "read_fixture",
    "reference_backend",
    "run_step",
    "step_schedule",
]
