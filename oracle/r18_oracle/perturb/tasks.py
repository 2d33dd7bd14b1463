"""Tasks of a worker: one kernel on the problems of a profile, or a program's batches.

Kernels are examined by `r18_oracle.check.perturbed`. Programs compute the tiny network. Each seed
compiles a new one, so that delays in branches are part of its graph, and gives it several batches
in a row from host memory. Every output must be that of its own batch, to the bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from r18.backend import Array, Backend, CompileOptions, Kernel
from r18.errors import described
from r18.graph.ops import Problem
from r18.graph.resnet import tiny
from r18.runtime.pipeline import pipeline
from r18.weights import load_weights
from r18_oracle.check.perturbed import CALM, Delays, Perturbed, has_raised, unable
from r18_oracle.findings import Failed, Finding
from r18_oracle.loading import kernel_of, loaded_backend
from r18_oracle.network.checkpoints import seeded_images
from r18_oracle.network.integers import executed
from r18_oracle.search.campaign import Announce, walk
from r18_oracle.search.network_run import program_label
from r18_oracle.search.profiles import Profile
from r18_oracle.search.worker import Job

BATCH = 3
BATCHES = 6
"""Batches in a row: two input buffers alternate, so each is refilled twice while runs are late."""
OUTPUTS = 2 * BATCHES
"""A program's outputs: each batch runs twice."""
PROGRAM_SECONDS = 120.0
"""A program hangs if it reports nothing for this long."""


@dataclass(frozen=True)
class Result:
    """The result of a kernel, or of a program.

    name: the kernel's id, or the program's label. problems: how many were accepted; for a program,
    how many batches ran. calls: with and without delays. finding: the kernel's smallest failing
    problem. broken: the program's fault, in a sentence. late: the deadline passed before the end.
    """

    name: str
    problems: int
    calls: int
    finding: Finding | None = None
    broken: str = ""
    seconds: float = 0.0
    late: bool = False

    @property
    def verdict(self) -> str:
        """`ok`, `FAIL`, or `nothing ran`."""
        if self.finding is not None or self.broken:
            return "FAIL"
        return "ok" if self.problems else "nothing ran"

    @property
    def spent(self) -> bool:
        """Whether the process must be replaced: after a fault its device may be lost."""
        return self.verdict == "FAIL"


class _TimeIsUp(BaseException):
    """The deadline has passed. A `BaseException`, so that Hypothesis does not try it again."""


class _Raised(BaseException):
    """A call raised; carries the finding. Smaller problems are not tried on a device that may be
    lost."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding


def perturb_kernel(
    *,
    backend: str,
    kernel: str,
    how: Profile,
    seed: int,
    network_name: str | None,
    delays: Delays,
    deadline: float,
    announce: Announce,
) -> Result:
    """Examine a kernel and its choices on every problem of a campaign, up to the first fault.

    deadline: on the clock of `time.monotonic`.
    """
    loaded, start = loaded_backend(backend), time.monotonic()
    one = kernel_of(loaded, kernel)
    perturbed = Perturbed(loaded, backend, delays, announce)
    taken = 0

    def attempt(which: Kernel, problem: Problem, data_seed: int, rounding: str) -> bool:
        nonlocal taken
        if time.monotonic() >= deadline:
            raise _TimeIsUp
        try:
            accepted = perturbed.examine(which, problem, data_seed, rounding)
        except Failed as failure:
            if has_raised(failure.finding):
                raise _Raised(failure.finding) from None
            raise
        taken += accepted
        return accepted

    finding, late = None, False
    try:
        walk(loaded, one, how, seed, network_name, attempt)
    except (Failed, _Raised) as failure:
        finding = failure.finding.on_kernel(one.id)
    except _TimeIsUp:
        late = True
    seconds = time.monotonic() - start
    return Result(kernel, taken, perturbed.calls, finding, seconds=seconds, late=late)


def program_job(backend: str, precision: str, delays: Delays, deadline: float = math.inf) -> Job:
    """`perturb_program` as a job."""
    arguments = {
        "backend": backend,
        "precision": precision,
        "delays": delays,
        "deadline": deadline,
    }
    name = program_label(backend, "all", precision)
    return Job(perturb_program, arguments, backend, name, PROGRAM_SECONDS, f"program/{precision}")


def perturb_program(
    *, backend: str, precision: str, delays: Delays, deadline: float, announce: Announce
) -> Result:
    """Run batches through programs of the tiny network; deadline as in `perturb_kernel`."""
    loaded, start = loaded_backend(backend), time.monotonic()
    name = program_label(backend, "all", precision)
    images = seeded_images(tiny(), BATCH).values
    batches = [np.roll(images, index, axis=0) * (index + 1) for index in range(BATCHES)]
    result = Result(name, 0, 0)
    try:
        calm = _outputs(loaded, precision, batches, Delays((CALM,), ()))
        for seed in delays.seeds:
            if time.monotonic() >= deadline:
                return replace(result, late=True)
            announce(None, "program", seed)
            got = _outputs(loaded, precision, batches, Delays((seed,), delays.kinds))
            result = replace(
                result,
                problems=OUTPUTS,
                calls=result.calls + OUTPUTS,
                seconds=time.monotonic() - start,
            )
            wrong = [i for i, (a, b) in enumerate(zip(calm, got, strict=True)) if not _same(a, b)]
            if wrong:
                what = f"batch {wrong[0]} of {OUTPUTS} differs from that without delays"
                return replace(result, broken=f"with delays of seed {seed}: {what}")
    except Exception as error:  # any exception of a program is a finding
        return replace(result, broken=f"raised {described(error)}")
    return result


def _outputs(backend: Backend, precision: str, batches: list[Array], delays: Delays) -> list[Array]:
    """The outputs of a new program, batch by batch: through the pipeline, then all enqueued at
    once. With an even seed the program is a graph."""
    (seed,) = delays.seeds
    if not backend.perturb(seed, delays.kinds):
        raise unable(backend)
    try:
        schedule = tiny()
        options = CompileOptions(BATCH, precision, "all", graph=seed % 2 == 0)
        weights = load_weights("synthetic:0", schedule)
        program = backend.compile(*executed(schedule, weights, batches[0], options), options)
        try:
            arrays = program.input_arrays()

            def filled() -> Iterator[Array]:
                for turn, batch in enumerate(batches):
                    arrays[turn % 2][...] = batch
                    yield arrays[turn % 2]

            piped = [output.copy() for output in pipeline(program, filled())]
            later = []
            for batch in batches:  # the host does not wait between runs
                program.load(batch)
                program.launch()
                later.append(program.fetch_later())
            return [*piped, *(fetch() for fetch in later)]
        finally:
            program.close()
    finally:
        backend.perturb(None)


def _same(one: Array, other: Array) -> bool:
    return one.tobytes() == other.tobytes()


__all__ = ["Result", "perturb_kernel", "perturb_program", "program_job"]
