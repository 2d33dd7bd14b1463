"""A whole network on a backend against float64, checkpoint by checkpoint, with two errors each.

- Propagated: the error of a run from the image, which is what users see. It may be at most a
  declared multiple of the error of PyTorch's own arithmetic in the same precision.
- Teacher-forced: each step of the plan gets the reference's values, rounded to its storage, and is
  judged by its derived bound. This locates the source of a propagated error.

In int8 both must be 0: integers are specified to the bit, and so are the logits. In fp8 the
reference is the network of the weights in e4m3, in float64 and without rounding in between.

The reference run, PyTorch's own run and the backend's run advance together, batch by batch. Only
one checkpoint of each is in memory, in addition to the values that the network still reads.
`Shared` keeps those of the reference for further backends and precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from r18.backend import Array, Backend, CompileOptions, Kernel, PlannedStep, Program
from r18.errors import ShapeError, UsageError, described
from r18.evaluate.margins import Call, calls, multiple
from r18.graph.ops import Normalize, Problem
from r18.graph.passes import fold_weights, from_pixels, fuse
from r18.graph.precision import precision as precision_of
from r18.graph.schedule import Schedule, checkpoint_names
from r18.runtime.fusing import keeping_checkpoints, schedule_for
from r18.weights.precisions import CALIBRATED, is_calibrated, is_quantized, is_scaled
from r18.weights.synthetic import IMAGE_NOISE, normal
from r18_oracle.cases import Case
from r18_oracle.check.call import Observation, observe
from r18_oracle.judge.reference import explanation, kernel_running
from r18_oracle.judge.verdict import judge, ratio_text
from r18_oracle.network.checkpoint_report import (
    UNTAPPED,
    CheckpointError,
    CheckpointReport,
    StepError,
    TopOne,
    findings_of,
    text,
)
from r18_oracle.network.images import Images
from r18_oracle.network.integers import executed
from r18_oracle.network.losses import LossSums, allowance_of
from r18_oracle.network.plans import check_plan, check_plans
from r18_oracle.network.reference_runs import LayerRun, pytorch_run, reference_run

DEFAULT_BATCH = 4
"""Images per run; more images take several runs, so that memory does not grow with their number."""


@dataclass
class Shared:
    """Results shared by comparisons of one network on the same weights and images, whatever the
    backend and the precision: the network in integers or e4m3, by precision and fusion level, and
    the float64 values that were read, by whether they are those networks'."""

    calibrated: dict[tuple[str, str], tuple[Schedule, Mapping[str, Array]]] = field(
        default_factory=dict
    )
    values: dict[tuple[bool, bool], dict[str, Array]] = field(default_factory=dict)

    def executed(
        self,
        schedule: Schedule,
        weights: Mapping[str, Array],
        images: Array,
        options: CompileOptions,
    ) -> tuple[Schedule, Mapping[str, Array]]:
        """As `r18_oracle.network.integers.executed`, whose scales take a float64 run."""
        if options.precision not in CALIBRATED:
            return executed(schedule, weights, images, options)
        key = options.precision, options.fusion
        if key not in self.calibrated:
            self.calibrated[key] = executed(schedule, weights, images, options)
        return self.calibrated[key]

    def known(self, schedule: Schedule) -> dict[str, Array]:
        return self.values.setdefault((is_quantized(schedule), is_scaled(schedule)), {})


def compare_checkpoints(
    backend: Backend,
    schedule: Schedule,
    weights: Mapping[str, Array],
    images: Images,
    *,
    precision: str = "fp32",
    fusion: str = "all",
    batch: int | None = None,
    taps: str | Sequence[str] = "canonical",
    kernels: Mapping[str, str] | None = None,
    pixels: Normalize | None = None,
    backend_name: str | None = None,
    seed: int = 0,
    progress: Callable[[str, Problem | None], None] | None = None,
    shared: Shared | None = None,
) -> CheckpointReport:
    """Run a schedule (at level `none`) on a backend and compare it with float64.

    In int8 the network is quantised (`r18_oracle.network.integers`), and compared with the
    reference of the quantised ops: every integer and every logit must be equal.

    batch:    images per run; by default `DEFAULT_BATCH`, or all images if there are fewer. The last
              run may be smaller.
    taps:     as in `checkpoint_names`, of the schedule at that fusion level; with "all", those that
              the backend's plans keep.
    kernels:  overrides, as in `CompileOptions`.
    pixels:   as in `CompileOptions`; the images are bytes, and so is the reference's input.
    backend_name, seed: for the findings, so that they can be replayed.
    progress: called before each run with a step and its problem, or with a program and None.
    shared:   of earlier comparisons of this network on these weights and images, in one run and
              without `pixels`.

    An exception from a kernel that is called on its own is a finding. Raises what compiling and
    running the program raise; `UnknownName` for a tap that the fused schedule lacks; `UsageError`
    for weights and images without a finite result in float64 or in the precision; `WrongPlan` for
    a plan, at this batch or one of `plans.BATCHES`, that does not compute the schedule's values
    with the backend's kernels.
    """
    images.check(schedule)
    count = images.batch
    options = CompileOptions(
        batch=min(count, DEFAULT_BATCH) if batch is None else min(count, batch),
        precision=precision,
        fusion=fusion,
        kernels=dict(kernels or {}),
        pixels=pixels,
    )
    firsts = range(0, count, options.batch)
    if pixels is not None or len(firsts) > 1:
        shared = None
    make = executed if shared is None else shared.executed
    schedule, weights = make(schedule, weights, images.values, options)
    sizes = {min(options.batch, count - first) for first in firsts}
    backend.probe()  # it may list and choose kernels by the device
    fused = _begun(_fused(schedule, options), options)
    names = _names(backend, schedule, fused, options, taps, sizes)
    check_plans(backend, schedule, fused, options)
    known = None if shared is None else shared.known(schedule)
    comparison = _Comparison(backend, schedule, fused, weights, names, options, progress, known)
    try:
        for first in firsts:
            comparison.add(images.values[first : first + options.batch], first)
    finally:
        comparison.close()
    name = backend_name or backend.name
    steps = tuple(comparison.steps.values())
    rows = comparison.rows()
    return CheckpointReport(
        backend=name,
        network=schedule.name,
        precision=precision,
        fusion=fusion,
        images=count,
        batch=options.batch,
        source=images.source,
        multiple=comparison.multiple,
        checkpoints=rows,
        steps=steps,
        top1=comparison.top1(rows),
        findings=findings_of(name, schedule, options, seed, steps, rows),
    )


def _names(
    backend: Backend,
    schedule: Schedule,
    fused: Schedule,
    options: CompileOptions,
    taps: str | Sequence[str],
    batches: Collection[int],
) -> list[str]:
    """The selected checkpoints; "all" leaves out those that some plan has fused away."""
    names = checkpoint_names(fused, taps)
    if taps != "all":
        return names
    options = keeping_checkpoints(schedule, options)
    plans = [schedule_for(backend, schedule, replace(options, batch=size)) for size in batches]
    return [name for name in names if all(name in plan.taps for plan in plans)]


def _fused(schedule: Schedule, options: CompileOptions) -> Schedule:
    """The schedule at the options' level, where one in integers or e4m3 is already."""
    return schedule if is_calibrated(schedule) else fuse(schedule, options.fusion)


def _begun(schedule: Schedule, options: CompileOptions) -> Schedule:
    """The schedule from the program's input: the image, or pixels."""
    return schedule if options.pixels is None else from_pixels(schedule, options.pixels)


class _Comparison:
    """The errors over all batches so far, in memory that does not grow with the images."""

    def __init__(
        self,
        backend: Backend,
        schedule: Schedule,
        fused: Schedule,
        weights: Mapping[str, Array],
        names: Sequence[str],
        options: CompileOptions,
        progress: Callable[[str, Problem | None], None] | None,
        known: dict[str, Array] | None,
    ) -> None:
        self._precision = precision_of(options.precision)
        self._integers = is_quantized(schedule)
        self._backend, self._schedule, self._weights = backend, schedule, weights
        self._options, self._known = options, known
        self._progress = progress or (lambda name, problem: None)
        self._unfused, self._fused = _begun(schedule, options), fused
        self._values = {name: fused.value_of(name) for name in names}
        self._values[UNTAPPED] = fused.output
        self._read = fold_weights(fused, weights)
        self._exact = self._read if is_calibrated(schedule) else weights
        self._pytorch = (
            None
            if self._integers  # there is nothing that it could lose
            else pytorch_run(self._unfused, fused, weights, self._precision)
        )
        self._open: list[Program] = []
        self._programs: dict[int, tuple[Program, Program]] = {}  # by batch
        self._sums = {name: LossSums() for name in self._values}
        self._since: dict[str, dict[str, None]] = {}  # steps since the previous checkpoint
        self._calls: list[Call] = []
        self.steps: dict[str, StepError] = {}
        self.multiple = self._multiple(())

    def close(self) -> None:
        for program in self._open:
            program.close()

    def add(self, images: Array, first: int) -> None:
        """Compare one batch; `first` is the number of its first image."""
        tapped, plain = self._compiled(len(images))
        plan = tapped.plan
        self._progress(f"program at batch {len(images)}", None)
        with kernel_running():
            output = plain(images)
            tapped.load(images)
            tapped.launch()
            tapped.synchronize()
        reads = [plan.tensors[key].value for step in plan.steps for key in step.inputs]
        compared = set(self._values.values())
        takes = [*reads, *compared]
        reference = reference_run(self._unfused, self._exact, images, takes, self._known)
        own = None if self._pytorch is None else self._pytorch(images, compared)
        steps: dict[str, None] = {}

        def compare(value: str) -> None:
            if value not in compared:
                return
            compared.remove(value)
            self._compare(value, reference, own, tapped, output, first)
            self._since.setdefault(value, {}).update(steps)
            steps.clear()

        compare(self._fused.input)
        for step in plan.steps:
            steps[step.name] = None
            self._progress(step.name, step.problem)
            self._force(
                step, tuple(reference.take(plan.tensors[k].value) for k in step.inputs), first
            )
            compare(plan.tensors[step.output].value)

    def _compiled(self, batch: int) -> tuple[Program, Program]:
        """The programs with and without taps."""
        if batch not in self._programs:
            self._progress(f"compiling at batch {batch}", None)
            tapped = self._compile(batch, tuple(name for name in self._values if name != UNTAPPED))
            self._programs[batch] = tapped, self._compile(batch, ())
            check_plan(self._backend, self._fused, tapped.plan, batch)
            algorithms = {step.kernel.contract.algorithm for step in tapped.plan.steps}
            self.multiple = max(self.multiple, self._multiple(algorithms))
        return self._programs[batch]

    def _multiple(self, algorithms: Collection[str]) -> float:
        return 0.0 if self._integers else multiple(algorithms, self._precision)

    def _compile(self, batch: int, taps: tuple[str, ...]) -> Program:
        options = replace(self._options, batch=batch, taps=taps)
        with kernel_running():
            program = self._backend.compile(self._schedule, self._weights, options)
        self._open.append(program)
        return program

    def _force(self, step: PlannedStep, inputs: tuple[Array, ...], first: int) -> None:
        """Call only the step's kernel, on the reference's values, and keep its worst call."""
        weights = tuple(self._read[name] for name in step.weights)
        case = Case.of(step.kernel, step.problem, inputs, weights)
        found = StepError(step.name, step.kernel.id, step.problem, first)
        try:
            seen = observe(self._backend, step.kernel, case)
        except Exception as error:  # any exception of a kernel is a finding
            found = replace(found, check="runs", message=f"raised {described(error)}")
        else:
            found = _judged(found, case, step.kernel, seen)
        before = self.steps.get(step.name)
        if before is None or found.ratio > before.ratio:
            self.steps[step.name] = found

    def _compare(
        self,
        value: str,
        reference: LayerRun,
        own: LayerRun | None,
        tapped: Program,
        output: Array,
        first: int,
    ) -> None:
        """Compare one value with the backend's, under each of its names."""
        expected = reference.take(value)
        names = [name for name, of in self._values.items() if of == value]
        if own is not None:
            lost = own.take(value)
            for name in names:
                self._sums[name].add_own(lost, expected)
            del lost
        for name in names:
            with kernel_running():
                got = output if name == UNTAPPED else tapped.fetch(name)
            if got.shape != expected.shape:
                raise ShapeError(
                    f"backend '{self._backend.name}' returned checkpoint '{name}' with shape "
                    f"{got.shape}, '{self._schedule.name}' has {expected.shape}"
                )
            self._sums[name].add(got, expected, first)
            if name == "logits" and expected.ndim == 2 and expected.shape[1] > 1:
                self._calls += calls(got, expected, first)

    def rows(self) -> tuple[CheckpointError, ...]:
        allowance = allowance_of(self._precision, self.multiple)
        return tuple(
            CheckpointError(
                name,
                value,
                self._sums[name].loss(allowance),
                max(
                    (self.steps[step] for step in self._since[value]),
                    key=lambda step: step.ratio,
                    default=None,
                ),
                tuple(self._since[value]),
            )
            for name, value in self._values.items()
        )

    def top1(self, rows: tuple[CheckpointError, ...]) -> TopOne | None:
        logits = next((row for row in rows if row.name == "logits"), None)
        if logits is None or not self._calls:
            return None
        bound = logits.loss.allowed_max
        return TopOne(
            len(self._calls),
            bound,
            tuple(c for c in self._calls if c.is_tie(bound)),
            tuple(c for c in self._calls if not c.is_tie(bound) and c.got != c.first),
        )


def _judged(step: StepError, case: Case, kernel: Kernel, seen: Observation) -> StepError:
    """The step with the verdict on its call: side effects first, then the output's bound."""
    for check, wrong in (
        ("global_state", seen.process),
        ("guard_zones", seen.trespass),
        ("inputs_unchanged", seen.changed),
    ):
        if wrong:
            return replace(step, check=check, message=wrong)
    judged = judge(case, kernel.contract, seen.output)
    if not judged.ok:
        whence = explanation(case.problem, *case.wide(), seen.output)
        message = f"error exceeds the bound (error/bound {ratio_text(judged.ratio)})"
        message += whence and f"; {whence}"
        step = replace(step, check="checkpoint", message=message)
    return replace(
        step,
        ratio=judged.ratio,
        sharp=judged.sharp,
        coordinate=judged.coordinate,
        got=judged.got,
        expected=judged.expected,
        bound=judged.allowed,
        picture=judged.picture,
    )


# -- input -------------------------------------------------------------------------------------


def seeded_images(schedule: Schedule, count: int, seed: int = 0) -> Images:
    """Noise at several scales, like photographs, with the same bits on every machine.

    The variance is about 1. Every other image has little fine noise: since global pooling averages
    it out, all images would be alike otherwise. An image does not depend on the count.
    Raises `UsageError` for a count below 1 or a negative seed.
    """
    if count < 1 or seed < 0:
        raise UsageError(f"count must be at least 1 and seed at least 0, got {count} and {seed}")
    channels, *extents = schedule.input_shape
    values = np.empty((count, channels, *extents), np.float32)
    for index in range(count):
        total = np.zeros((channels, *extents))
        for scale, std in IMAGE_NOISE.items():
            coarse = (channels, *(-(-extent // scale) for extent in extents))
            noise = normal(seed, f"image {index}/{scale}", coarse, std)
            if scale == 1 and index % 2:
                noise *= 0.25
            for axis in range(1, noise.ndim):
                noise = noise.repeat(scale, axis=axis)
            total += noise[tuple(map(slice, total.shape))]
        values[index] = total
    return Images(values, f"images of seed {seed}")


def seeded_pixels(schedule: Schedule, count: int, normalize: Normalize) -> Images:
    """The images of `seeded_images` as bytes: the nearest that `normalize` maps to them."""
    images = seeded_images(schedule, count, 0)
    mean, std = (np.array(values)[:, None, None] for values in (normalize.mean, normalize.std))
    shades = np.clip(np.rint(255 * (images.values * std + mean)), 0, 255)
    return Images(shades.astype(np.uint8), "pixels of seed 0")


__all__ = [
    "DEFAULT_BATCH",
    "UNTAPPED",
    "CheckpointError",
    "CheckpointReport",
    "Shared",
    "StepError",
    "TopOne",
    "compare_checkpoints",
    "seeded_images",
    "seeded_pixels",
    "text",
]
