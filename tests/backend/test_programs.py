"""The suite's checks of programs: correct programs pass all of them, a wrong one fails its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from faulty_backends import Arrays, Right
from r18.backend import Array, CompileOptions, Plan, Program, RoundingContract, StepTime
from r18.backend.host import HostBuffer, HostKernel
from r18.errors import R18Error
from r18.graph.ops import Normalize
from r18.graph.precision import FP32
from r18.graph.schedule import Schedule
from r18.runtime.plan import make_plan
from r18_oracle.conformance.programs import CHECKS, Subject, check_program
from support import compute
from tiled_backend import Tiled


def normalize(op: Normalize, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
    out[...] = compute(op, (inputs[0].transpose(0, 3, 1, 2),), ())


class Made(Right):
    """A backend with right kernels, one of them for pixels, and programs of a given class."""

    def __init__(self, program: type[Program]) -> None:
        super().__init__()
        self._program = program

    def more(self) -> tuple[HostKernel, ...]:
        contract = RoundingContract("normalize", "float32", "float32")
        return (HostKernel("faulty", Normalize, "plain", FP32, contract, run=normalize),)

    def compile(
        self, schedule: Schedule, weights: Mapping[str, Array], options: CompileOptions
    ) -> Any:
        return self._program(self, make_plan(self, schedule, options), weights)


# -- wrong programs ----------------------------------------------------------------------------


class TapsChangeIt(Program):
    def fetch(self, name: str | None = None) -> Array:
        return super().fetch(name) + np.float32(1e-6 if self.plan.options.taps else 0)


class ArenaChangesIt(Program):
    def fetch(self, name: str | None = None) -> Array:
        return super().fetch(name) + np.float32(0 if self.plan.options.arena else 1e-6)


class ForgetsItsInput(Program):
    def launch(self) -> None:
        super().launch()
        self._memory.fill(self._buffer(self.plan.schedule.input), 0)


class WritesToItsInput(Program):
    def load(self, images: Array) -> None:
        super().load(images)
        images[:] = 0


class FetchesItsOwnMemory(Program):
    def fetch(self, name: str | None = None) -> Array:
        if name is not None:
            return super().fetch(name)
        tensor = self.plan.tensors[self.plan.schedule.output]
        buffer = self._buffer(tensor.value)
        assert isinstance(buffer, HostBuffer)
        return buffer.as_array(tensor.shape, tensor.dtype)


class MixesSamples(Program):
    def fetch(self, name: str | None = None) -> Array:
        logits = super().fetch(name)
        return logits - np.float32(0.01) * logits.mean(axis=0)


class KnowsPositions(Program):
    def fetch(self, name: str | None = None) -> Array:
        found = super().fetch(name)
        if name is None:
            found += np.float32(0.01) * np.arange(len(found), dtype=np.float32)[:, None]
        return found


class SharesItsResult(Program):
    last: ClassVar[Array]

    def launch(self) -> None:
        super().launch()
        SharesItsResult.last = super().fetch()

    def fetch(self, name: str | None = None) -> Array:
        return self.last.copy()


class FetchesTooLate(Program):
    def fetch_later(self) -> Callable[[], Array]:
        return self.fetch


class SwapsChannels(Program):
    def load(self, images: Array) -> None:
        super().load(images[:, ::-1])


class LocksNothing(Program):
    def __call__(self, images: Array) -> Array:
        self.load(images)
        time.sleep(0.002)
        self.launch()
        time.sleep(0.002)
        return self.fetch()


class FetchesDoubles(Program):
    def fetch(self, name: str | None = None) -> Array:
        return super().fetch(name).astype(np.float64)


class FetchesFlat(Program):
    def fetch(self, name: str | None = None) -> Array:
        found = super().fetch(name)
        return found.reshape(len(found), -1)


class FetchesWhatWasNotKept(Program):
    def fetch(self, name: str | None = None) -> Array:
        try:
            return super().fetch(name)
        except R18Error:
            return super().fetch()


class RunsOtherKernels(Program):
    @property
    def plan(self) -> Plan:
        first, *others = super().plan.steps
        other = replace(first, kernel=replace(first.kernel, algorithm="fast"))  # type: ignore[type-var]
        return replace(super().plan, steps=(other, *others))


class LosesTheLastStep(Program):
    def profile(self) -> list[StepTime]:
        return super().profile()[:-1]


class TakesNegativeTime(Program):
    def profile(self) -> list[StepTime]:
        return [replace(time, milliseconds=-time.milliseconds - 1) for time in super().profile()]


class TakesAnyInput(Program):
    def load(self, images: Array) -> None:
        shape = self.plan.tensors[self.plan.schedule.input].shape
        super().load(np.resize(images, shape).astype(np.float32))


class StaysOpen(Program):
    def close(self) -> None: ...


WRONG = [
    ("taps_graph_and_arena_change_nothing", TapsChangeIt, "taps: logits differ by"),
    ("taps_graph_and_arena_change_nothing", ArenaChangesIt, "arena=False: logits differ by"),
    ("a_launch_may_be_repeated", ForgetsItsInput, "a second launch of the same batch"),
    ("a_launch_may_be_repeated", WritesToItsInput, "wrote to the images it was given"),
    ("a_launch_may_be_repeated", FetchesItsOwnMemory, "wrote to what had been fetched"),
    ("a_sample_does_not_depend_on_its_batch", MixesSamples, "sample 0 alone"),
    ("a_sample_does_not_depend_on_its_batch", KnowsPositions, "samples moved by one"),
    ("programs_do_not_disturb_each_other", SharesItsResult, "the first of two programs"),
    ("batches_follow_one_another", FetchesTooLate, "batch 0 of several"),
    ("threads_may_share_a_program", LocksNothing, "thread "),
    ("pixels_are_normalised_first", SwapsChannels, "checkpoint 'stem_pool' loses"),
    ("checkpoints_have_their_shapes", FetchesDoubles, "'stem_pool' is float64"),
    ("checkpoints_have_their_shapes", FetchesFlat, "'stem_pool' was fetched as (3, 512)"),
    ("checkpoints_have_their_shapes", FetchesWhatWasNotKept, "raised nothing, instead of Unknown"),
    ("steps_are_kernels_of_the_backend", RunsOtherKernels, "'faulty/conv2d/fast/fp32', not listed"),
    ("a_profile_lists_every_step", LosesTheLastStep, "the plan "),
    ("a_profile_lists_every_step", TakesNegativeTime, " ms"),
    ("wrong_input_is_refused", TakesAnyInput, "raised nothing, instead of ShapeError"),
    ("a_closed_program_says_so", StaysOpen, "calling when closed raised nothing"),
]


@pytest.mark.parametrize(("check", "program", "message"), WRONG)
def test_a_wrong_program_fails_its_check(check: str, program: type[Program], message: str) -> None:
    with pytest.raises(AssertionError) as raised:
        CHECKS[check](Subject(Made(program), "fp32", "all"))
    assert message in str(raised.value)


def test_every_check_has_a_program_that_fails_it() -> None:
    assert {check for check, _, _ in WRONG} == set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_right_programs_pass(check: str) -> None:
    CHECKS[check](Subject(Made(Program), "fp32", "all"))


def test_a_step_may_run_a_tile_of_a_kernel() -> None:
    CHECKS["steps_are_kernels_of_the_backend"](Subject(Tiled(), "fp32", "all"))


def test_kernels_that_keep_no_bits_are_given_what_two_right_programs_may_differ_by() -> None:
    right = Subject(Right(), "fp32", "none")
    images = np.zeros((3, 10), np.float32)
    assert 1e-7 < right.slack < 1e-2
    with pytest.raises(AssertionError, match="to the bit is declared"):
        right.same(images + np.float32(1e-7), images, "it")
    right.same(images + np.float32(1e-7), images, "it", across_batches=True)
    with pytest.raises(AssertionError, match="is allowed"):
        right.same(images + np.float32(1e-2), images, "it", across_batches=True)
    with pytest.raises(AssertionError, match="it: logits differ by nan"):
        right.same(images * np.float32("nan"), images, "it", across_batches=True)


def test_what_a_program_raises_is_told_in_words() -> None:
    """A program's exception is reported as text, since not all exceptions can leave a worker."""
    with pytest.raises(AssertionError, match=r"^raised MemoryError: out of device memory$"):
        check_program(
            check="wrong_input_is_refused",
            backend="faulty_backends:RaisingProgram",
            precision="fp32",
            fusion="all",
            announce=lambda problem, kind, seed: None,
        )
