"""The outputs of a benchmark's contenders against float64; backends and baselines by one rule.

The rule is that of the checkpoints, applied to the output, which every contender has: its loss may
be at most a declared multiple of the loss of PyTorch's own arithmetic (`r18.evaluate.margins`). A
contender within it has the right top-1 wherever the reference's margin is wider than twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from r18.backend import Array, CompileOptions
from r18.bench.baselines import peers_precision
from r18.bench.baselines.integers import peer_integers
from r18.bench.baselines.ways import EXPORTED, PEERS
from r18.bench.contenders import Compiled
from r18.bench.error import Error
from r18.bench.rows import Contender, Row, Runner
from r18.errors import R18Error, ShapeError
from r18.evaluate.margins import Allowance, multiple
from r18.graph.passes import FUSION_LEVELS, fuse
from r18.graph.precision import FP8, INT8
from r18.graph.precision import precision as precision_of
from r18.graph.schedule import Schedule
from r18.weights.precisions import CALIBRATED, in_precision, is_scaled, quantization_of
from r18_oracle.judge.reference import kernel_running
from r18_oracle.network.checkpoints import seeded_images
from r18_oracle.network.losses import Loss, LossSums
from r18_oracle.network.output_errors import OutputErrors
from r18_oracle.network.reasons import Reasons, explain_values
from r18_oracle.network.reference_runs import pytorch_run, reference_run
from r18_oracle.ops.integers.arithmetics import PAIRS, UNEXPLAINED

IMAGES = 2
"""The most different images; a larger batch repeats them."""
SEED = 0
"""The seed of the images."""


def output_loss(
    contender: Contender, runner: Runner, schedule: Schedule, weights: Mapping[str, Array]
) -> Loss:
    """Run a contender made from a schedule (at level `none`) on seeded images.

    Raises what running raises; `UsageError` for weights that give no finite result in float64 or
    in the precision; `UnknownName` for a precision that is not stored in floating point;
    `ShapeError` for an output of another shape.
    """

    def run(images: Array) -> Array:
        runner.load(images)
        runner.run()
        return runner.fetch()

    level = contender.fusion if contender.fusion in FUSION_LEVELS else "none"
    yardstick = Yardstick(schedule, weights, contender.precision)
    return yardstick.loss(contender.name, contender.shape[0], run, level, _algorithms(runner))


class Yardstick:
    """The float64 output on seeded images, and the loss of PyTorch's arithmetic in a precision.

    schedule: at level `none`. In fp8 both compute the scaled network. Raises `UnknownName` for a
    precision that is not stored in floating point, and `WeightsError` for fp8 and weights that have
    no quantisation.
    """

    def __init__(self, schedule: Schedule, weights: Mapping[str, Array], precision: str) -> None:
        if precision == FP8.name:
            options = CompileOptions(precision=precision)
            schedule, weights = in_precision(schedule, weights, options)
        self._schedule = schedule
        self._weights = weights
        self._precision = precision_of(precision)
        self._expected: dict[int, Array] = {}
        self._own: dict[tuple[int, str], Array] = {}
        Allowance.of(self._precision, 1)

    def loss(
        self,
        name: str,
        batch: int,
        run: Callable[[Array], Array],
        level: str,
        algorithms: Iterable[str],
    ) -> Loss:
        """The loss of `run`, which maps a batch of images to an output.

        name: for messages. level: the fusion level, which sets how often a narrow format rounds.
        algorithms: those of the kernels.

        Raises what `run` raises; `UsageError` for weights that give no finite result in float64 or
        in the precision; `ShapeError` for an output of another shape.
        """
        count = min(batch, IMAGES)
        images = seeded_images(self._schedule, count, SEED).values
        filled = np.arange(batch) % count
        with kernel_running():
            got = run(images[filled])
        own, expected = self._reference(images, level)
        if got.shape != expected[filled].shape:
            raise ShapeError(
                f"'{name}' put out {got.shape}, '{self._schedule.name}' makes it "
                f"{expected[filled].shape}"
            )
        sums = LossSums()
        sums.add_own(own[filled], expected[filled])
        sums.add(got, expected[filled], 0)
        return sums.loss(Allowance.of(self._precision, multiple(algorithms, self._precision)))

    def _reference(self, images: Array, level: str) -> tuple[Array, Array]:
        """The output in PyTorch's own arithmetic and in float64; each is computed once."""
        schedule, count = self._schedule, len(images)
        value = schedule.output
        if (count, level) not in self._own:
            fused = schedule if is_scaled(schedule) else fuse(schedule, level)
            run = pytorch_run(schedule, fused, self._weights, self._precision)
            self._own[count, level] = run(images, [value]).take(value)
        if count not in self._expected:
            exact = reference_run(schedule, self._weights, images, [value])
            self._expected[count] = exact.take(value)
        return self._own[count, level], self._expected[count]


class IntegerYardstick:
    """The output that the reference computes in integers: a contender's is equal, bit for bit.

    ONNX Runtime and OpenVINO have arithmetics of their own; of theirs every element is explained,
    and no sum of products may saturate.

    schedule: at level `none`. Raises `WeightsError` for weights without a quantisation.
    """

    def __init__(self, schedule: Schedule, weights: Mapping[str, Array]) -> None:
        options = CompileOptions(precision=INT8.name)
        self._integers, self._weights = in_precision(schedule, weights, options)
        self._schedule = schedule
        self._quantization = quantization_of(weights)
        self._expected: dict[int, Array] = {}

    def fault_of_peer(self, mode: str, runner: Runner, batch: int) -> str:
        """Describe the first fault inside a peer; empty where a known arithmetic without saturating
        sums gives every element of every value.

        The images are those of its output, which must equal that of the peer that is examined.
        mode: the peer's.
        """
        images = seeded_images(self._schedule, min(batch, IMAGES), SEED).values
        images = images[np.arange(batch) % len(images)]
        with kernel_running():
            runner.load(images)
            runner.run()
            got = runner.fetch()
        try:
            values = peer_integers(mode, self._schedule, self._quantization, images)
        except R18Error as error:
            return str(error)
        apart = values[self._integers.output] != got
        if apart.any():
            return (
                f"{apart.sum():,} of {got.size:,} logits are not those of the same model with the "
                "values inside as outputs"
            )
        values[self._schedule.input] = images
        return _fault(explain_values(self._schedule, self._quantization, values, values))

    def fault(self, runner: Runner, batch: int) -> str:
        """Whether an output on seeded images has another bit than the reference's, in words; empty
        where it has none."""
        count = min(batch, IMAGES)
        images = seeded_images(self._schedule, count, SEED).values
        filled = np.arange(batch) % count
        with kernel_running():
            runner.load(images[filled])
            runner.run()
            got = runner.fetch()
        if count not in self._expected:
            value = self._integers.output
            run = reference_run(self._integers, self._weights, images, [value])
            self._expected[count] = run.take(value)
        expected = self._expected[count][filled]
        if got.shape != expected.shape:
            return f"its logits have the shape {got.shape}, not {expected.shape}"
        apart = int((got != expected).sum())
        return f"{apart:,} of {got.size:,} logits are not the reference's" if apart else ""


def _fault(found: Reasons) -> str:
    """Describe the faults in a peer's integers: sums that saturate, and unexplained elements."""
    counts = found.total(0)
    parts = []
    short = sum(count for name, count in counts.items() if PAIRS in name)
    if short:
        parts.append(
            f"{short:,} elements inside are of sums whose pairs of products saturate at 16 bits, "
            "as on CPUs without VNNI"
        )
    if counts[UNEXPLAINED]:
        steps = [row.step for row in found.rows if row.sides[0].unexplained]
        parts.append(
            f"{counts[UNEXPLAINED]:,} elements inside are those of no known arithmetic, the first "
            f"in step '{steps[0]}'"
        )
    return "; ".join(parts)


_Key = tuple[str, str, str, int, str]
"""The key of a row: name, kind of device, precision, batch and algorithm."""


def _key(contender: Contender) -> _Key:
    one = contender
    return one.name, one.device.kind, one.precision, one.shape[0], one.algorithm


class OutputJudge:
    """The `judge` and the `error_of` of `r18.bench.timing.bench`.

    schedule: at level `none`. precisions: of all contenders. Raises `UnknownName` for a precision
    that it could not judge, and `WeightsError` for int8 with weights without a quantisation, before
    anything is timed.
    """

    def __init__(
        self, schedule: Schedule, weights: Mapping[str, Array], precisions: Iterable[str]
    ) -> None:
        names = set(precisions)
        self._schedule, self._weights = schedule, weights
        self._integers = IntegerYardstick(schedule, weights) if INT8.name in names else None
        for name in names - {INT8.name}:
            Allowance.of(precision_of(name), 1)
        self._errors = OutputErrors(schedule, weights)
        self._faults: dict[_Key, str] = {}

    def loss(self, contender: Contender, runner: Runner) -> float:
        """A contender's loss over its allowance.

        In int8 nothing may be lost: 0 for an output that equals the reference's, and for a peer
        whose elements are all explained (`r18_oracle.network.reasons`) by exact sums or those of
        float32, else infinite, and `fault` says why. A peer that runs in another precision there is
        judged in that one.
        """
        schedule, weights, integers = self._schedule, self._weights, self._integers
        if contender.name in PEERS and contender.precision in CALIBRATED:
            played = peers_precision(contender.precision, contender.device.kind)
            contender = replace(contender, precision=played)
        if contender.precision == INT8.name:
            assert integers is not None  # every precision of the field is among `precisions`
            batch = contender.shape[0]
            if contender.name in EXPORTED:
                fault = integers.fault_of_peer(contender.name, runner, batch)
            else:
                fault = integers.fault(runner, batch)
            self._faults[_key(contender)] = fault
            return np.inf if fault else 0.0
        return _ratio(output_loss(contender, runner, schedule, weights))

    def fault(self, row: Row) -> str:
        """Describe the fault in the integers of a judged row; empty without one, and in other
        precisions."""
        key = row.backend, row.device_kind, row.precision, row.batch, row.algorithm
        return self._faults.get(key, "")

    def error(self, contender: Contender, runner: Runner) -> Error:
        """See `OutputErrors.of`."""
        return self._errors.of(contender, runner)


def judge_of(
    schedule: Schedule, weights: Mapping[str, Array], precisions: Iterable[str]
) -> OutputJudge:
    """The hook `output_judge` of `r18 bench`."""
    return OutputJudge(schedule, weights, precisions)


def drop_in_judge(
    schedule: Schedule, weights: Mapping[str, Array], precision: str
) -> Callable[[str, int, Callable[[Array], Array], str, Iterable[str]], float]:
    """The `judge` of `r18.bench.profile.profile`, by the same rule; its arguments are
    `Yardstick.loss`'s.

    Raises `UnknownName` for a precision that it could not judge.
    """
    yardstick = Yardstick(schedule, weights, precision)
    return lambda *asked: _ratio(yardstick.loss(*asked))


def _ratio(loss: Loss) -> float:
    return loss.ratio if loss.nonfinite == 0 else np.inf


def _algorithms(runner: Runner) -> set[str]:
    """The algorithms that kernels declare; a baseline declares none."""
    steps = runner.program.plan.steps if isinstance(runner, Compiled) else ()
    return {step.kernel.contract.algorithm for step in steps}


__all__ = [
    "IMAGES",
    "IntegerYardstick",
    "OutputJudge",
    "Yardstick",
    "drop_in_judge",
    "judge_of",
    "output_loss",
]
