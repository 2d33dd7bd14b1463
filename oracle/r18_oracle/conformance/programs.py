"""Checks of compiled programs: what the protocol promises, on the tiny network.

Each is a function of a `Subject` that raises `AssertionError` with a sentence; they run in a worker
process, where a program may crash or hang. Whether the numbers are right is not asked here but by
`r18_oracle.network.checkpoints`: results are compared with each other, by bits where the kernels
declare that bits are kept, else within the allowed difference of two right programs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from r18.backend import Array, Backend, CompileOptions, Kernel, Program
from r18.backend.registry import load_backend
from r18.errors import ProgramClosed, ShapeError, UnknownName, UsageError
from r18.graph.ops import Normalize
from r18.graph.precision import precision as precision_of
from r18.graph.quantized import QuantizePixels
from r18.graph.resnet import tiny
from r18.graph.schedule import CANONICAL, Schedule
from r18.images.preprocess import Preprocess
from r18.runtime.pipeline import pipeline
from r18.runtime.plan import make_plan
from r18.weights import load_weights
from r18_oracle.loading import planned_kernels
from r18_oracle.network.checkpoints import (
    UNTAPPED,
    compare_checkpoints,
    seeded_images,
    seeded_pixels,
)
from r18_oracle.network.images import Images
from r18_oracle.network.integers import executed
from r18_oracle.search.campaign import Announce

BATCH = 3
THREADS = 4
ROUNDS = 3


@dataclass(frozen=True)
class Subject:
    """The tiny network on a backend, in a precision, at a fusion level."""

    backend: Backend
    precision: str
    fusion: str

    @cached_property
    def schedule(self) -> Schedule:
        return tiny()

    @cached_property
    def images(self) -> Images:
        return seeded_images(self.schedule, BATCH)

    def options(self, batch: int = BATCH, **more: Any) -> CompileOptions:
        return CompileOptions(batch, self.precision, self.fusion, **more)

    def network(self, seed: int = 0) -> tuple[Schedule, Mapping[str, Array]]:
        """The schedule and weights to compile: synthetic weights of a seed, or integers made from
        them."""
        return executed(self.schedule, _weights(seed), self.images.values, self.options())

    @contextmanager
    def program(self, batch: int = BATCH, seed: int = 0, **more: Any) -> Iterator[Program]:
        """A program with the synthetic weights of a seed, closed at the end."""
        options = self.options(batch, **more)
        program = self.backend.compile(*self.network(seed), options)
        try:
            yield program
        finally:
            program.close()

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The planned kernels."""
        plan = make_plan(self.backend, self.network()[0], self.options())
        return tuple(step.kernel for step in plan.steps)

    @cached_property
    def slack(self) -> float:
        """The allowed difference of the logits of two right programs: twice what one may lose."""
        report = compare_checkpoints(
            self.backend,
            self.schedule,
            _weights(0),
            self.images,
            precision=self.precision,
            fusion=self.fusion,
        )
        (row,) = (row for row in report.checkpoints if row.name == UNTAPPED)
        return 2 * row.loss.allowed_max

    def same(self, got: Array, expected: Array, what: str, *, across_batches: bool = False) -> None:
        """Assert equality to the bit, unless a kernel does not declare that; then equality within
        `slack`."""
        bits = all(k.deterministic for k in self.kernels)
        if across_batches:
            bits &= all(k.batch_invariant for k in self.kernels)
        difference = float(np.max(np.abs(got.astype(np.float64) - expected)))
        allowed = 0.0 if bits else self.slack
        assert difference <= allowed, f"{what}: logits differ by {difference:.3g}, " + (
            "to the bit is declared" if bits else f"{allowed:.3g} is allowed"
        )


@cache
def _weights(seed: int) -> Mapping[str, Array]:
    return load_weights(f"synthetic:{seed}", tiny())


def check_program(
    *, check: str, backend: str, precision: str, fusion: str, announce: Announce
) -> None:
    """Run one of `CHECKS`, in a worker; an `AssertionError` says what is wrong."""
    loaded = load_backend(backend)
    loaded.probe()
    announce(None, check, 0)
    try:
        CHECKS[check](Subject(loaded, precision, fusion))
    except AssertionError:
        raise
    except Exception as error:  # not every exception survives the way to the parent process
        raise AssertionError(f"raised {type(error).__name__}: {error}") from None


# -- results -----------------------------------------------------------------------------------


def taps_graph_and_arena_change_nothing(subject: Subject) -> None:
    """Logits do not depend on what is tapped, captured, or shares memory."""
    images = subject.images.values
    with subject.program() as program:
        expected = program(images)
    variants: dict[str, dict[str, Any]] = {
        "taps": {"taps": CANONICAL},
        "graph=False": {"graph": False},
        "arena=False": {"arena": False},
    }
    for name, options in variants.items():
        with subject.program(**options) as program:
            subject.same(program(images), expected, name)


def a_launch_may_be_repeated(subject: Subject) -> None:
    """Launch again without a load, and again after another batch; a fetched array belongs to the
    caller."""
    images = subject.images.values
    with subject.program() as program:
        given = images.copy()
        first = program(given)
        assert np.array_equal(given, images), "the program wrote to the images it was given"
        program.launch()
        program.synchronize()
        subject.same(program.fetch(), first, "a second launch of the same batch")
        program.load(images[::-1])
        program.launch()
        program.launch()
        other = program.fetch()
        mine = other.copy()
        program(images)
        assert np.array_equal(other, mine), "a later launch wrote to what had been fetched"
        subject.same(program(images), first, "the first batch again, after another")


def a_sample_does_not_depend_on_its_batch(subject: Subject) -> None:
    """Run a sample alone, and at another place of a batch."""
    images = subject.images.values
    with subject.program() as program:
        together = program(images)
        moved = program(np.roll(images, 1, axis=0))
    subject.same(np.roll(moved, -1, axis=0), together, "samples moved by one", across_batches=True)
    with subject.program(batch=1) as program:
        for index in range(BATCH):
            alone = program(images[index : index + 1])
            what = f"sample {index} alone"
            subject.same(alone, together[index : index + 1], what, across_batches=True)


def programs_do_not_disturb_each_other(subject: Subject) -> None:
    """Load, launch and fetch two programs with different weights in turn."""
    images = subject.images.values
    with subject.program(seed=0) as one, subject.program(seed=1) as other:
        first, second = one(images), other(images)
        assert not np.array_equal(first, second), "other weights give the same logits"
        one.load(images)
        other.load(images)
        one.launch()
        other.launch()
        subject.same(one.fetch(), first, "the first of two programs")
        subject.same(other.fetch(), second, "the second of two programs")


def batches_follow_one_another(subject: Subject) -> None:
    """Whether runs from host memory overlap or not, every output is that of its own batch."""
    images = subject.images.values
    batches = [np.roll(images, index, axis=0) * (index + 1) for index in range(5)]
    with subject.program() as program:
        expected = [program(batch) for batch in batches]
        arrays = program.input_arrays()

        def filled() -> Iterator[Array]:
            for turn, batch in enumerate(batches):
                arrays[turn % 2][...] = batch
                yield arrays[turn % 2]

        for index, got in enumerate(pipeline(program, filled())):
            subject.same(got, expected[index], f"batch {index} of several")


def threads_may_share_a_program(subject: Subject) -> None:
    """Calls from several threads, each with its own batch, each get their own result."""
    images = subject.images.values
    batches = [np.roll(images, index, axis=0) * (index + 1) for index in range(THREADS)]
    wrong: list[str] = []
    with subject.program() as program:
        expected = [program(batch) for batch in batches]
        begin = threading.Barrier(THREADS)

        def work(index: int) -> None:
            try:
                begin.wait(30)
                for _ in range(ROUNDS):
                    subject.same(program(batches[index]), expected[index], f"thread {index}")
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


def pixels_are_normalised_first(subject: Subject) -> None:
    """A program of pixels loses no more than it may, where there is a kernel for it."""
    begins = (Normalize, QuantizePixels)
    kernels = subject.backend.kernels()
    if not any(k.op in begins and k.precision.name == subject.precision for k in kernels):
        return  # no backend needs one
    normalize = Preprocess().normalize
    report = compare_checkpoints(
        subject.backend,
        subject.schedule,
        _weights(0),
        seeded_pixels(subject.schedule, BATCH, normalize),
        precision=subject.precision,
        fusion=subject.fusion,
        pixels=normalize,
    )
    assert not report.findings, report.findings[0].describe()
    with subject.program(pixels=normalize) as program:
        _raises(UsageError, "an image as pixels", partial(program, subject.images.values))


# -- the protocol ------------------------------------------------------------------------------


def checkpoints_have_their_shapes(subject: Subject) -> None:
    """Every canonical checkpoint can be fetched: float32 (integers, too), float64 from an fp64
    program."""
    wide = precision_of(subject.precision).dtype == np.float64
    with subject.program(taps=CANONICAL) as program:
        output = program(subject.images.values)
        schedule = program.plan.schedule
        shapes = schedule.shapes(BATCH)
        for name in CANONICAL:
            got = program.fetch(name)
            wanted = shapes[schedule.value_of(name)]
            assert got.shape == wanted, f"'{name}' was fetched as {got.shape}, it is {wanted}"
            assert got.dtype == (np.float64 if wide else np.float32), f"'{name}' is {got.dtype}"
            assert np.isfinite(got).all(), f"'{name}' holds NaN or infinities"
        assert np.array_equal(program.fetch("logits"), output), (
            "'logits' are not what the call gave"
        )
        _raises(UnknownName, "fetching a checkpoint of no such name", lambda: program.fetch("gop"))
    with subject.program() as program:
        program(subject.images.values)
        _raises(UsageError, "fetching what was not tapped", lambda: program.fetch("layer1"))


def steps_are_kernels_of_the_backend(subject: Subject) -> None:
    """Each step of the plan names a kernel that the backend lists and that takes its problem."""
    listed = planned_kernels(subject.backend)
    with subject.program() as program:
        for step in program.plan.steps:
            assert step.kernel.id in listed, f"'{step.name}' runs '{step.kernel.id}', not listed"
            reason = step.kernel.refusal(step.problem)
            assert reason is None, f"'{step.name}': {step.kernel.id} refuses: {reason}"
            assert step.kernel.precision.name == subject.precision, f"'{step.name}' is not in it"


def a_profile_lists_every_step(subject: Subject) -> None:
    """The profile has the steps in order, each with its kernel and a time; it changes no result."""
    with subject.program() as program:
        expected = program(subject.images.values)
        times = program.profile()
        got = [(time.step, time.kernel) for time in times]
        planned = [(step.name, step.kernel.id) for step in program.plan.steps]
        assert got == planned, f"profile lists {got}, the plan {planned}"
        for time in times:
            assert 0 <= time.milliseconds < float("inf"), f"{time.step} took {time.milliseconds} ms"
        program.launch()
        subject.same(program.fetch(), expected, "a launch after a profile")


def wrong_input_is_refused(subject: Subject) -> None:
    """Another batch or image size and integer pixels are refused, and the program can still run."""
    images = subject.images.values
    with subject.program() as program:
        expected = program(images)
        for wrong in (images[:-1], images[:, :, :-1], images[0]):
            _raises(ShapeError, f"input of shape {wrong.shape}", partial(program, wrong))
        _raises(UsageError, "integers as input", partial(program, images.astype(np.uint8)))
        subject.same(program(images), expected, "a call after input that was refused")


def a_closed_program_says_so(subject: Subject) -> None:
    """Everything but another `close` raises `ProgramClosed`."""
    images = subject.images.values
    with subject.program() as program:
        program(images)
        program.close()
        program.close()
        for name, use in {
            "calling": lambda: program(images),
            "load": lambda: program.load(images),
            "launch": program.launch,
            "synchronize": program.synchronize,
            "fetch": program.fetch,
            "profile": program.profile,
        }.items():
            _raises(ProgramClosed, f"{name} when closed", use)


def _raises(wanted: type[Exception], what: str, use: Callable[[], object]) -> None:
    try:
        use()
    except wanted:
        return
    except Exception as error:
        got = f"raised {type(error).__name__}: {error}"
    else:
        got = "raised nothing"
    raise AssertionError(f"{what} {got}, instead of {wanted.__name__}")


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        taps_graph_and_arena_change_nothing,
        a_launch_may_be_repeated,
        a_sample_does_not_depend_on_its_batch,
        programs_do_not_disturb_each_other,
        batches_follow_one_another,
        threads_may_share_a_program,
        pixels_are_normalised_first,
        checkpoints_have_their_shapes,
        steps_are_kernels_of_the_backend,
        a_profile_lists_every_step,
        wrong_input_is_refused,
        a_closed_program_says_so,
    )
}
