"""What the contenders of a benchmark put out, against float64: backends and peers by one rule.

The rule of the checkpoints, at the only one that every contender has, its output: it may lose at
most a declared multiple of what PyTorch's own arithmetic loses (`r18.margins`). What keeps
it has the right top-1 too, wherever the reference's margin is wider than twice that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from r18.backend import FUSION_LEVELS, Array
from r18.bench import Contender, Runner
from r18.contenders import Compiled
from r18.errors import ShapeError
from r18.margins import Allowance, multiple
from r18.passes import fuse
from r18.precision import precision as precision_of
from r18.schedule import Schedule
from r18_oracle.checkpoints import seeded_images
from r18_oracle.losses import Loss, LossSums
from r18_oracle.reference import kernel_running
from r18_oracle.walks import pytorch_walk, reference_walk

IMAGES = 2
"""Different images at most; a larger batch holds each of them several times."""


def output_loss(
    contender: Contender,
    runner: Runner,
    schedule: Schedule,
    weights: Mapping[str, Array],
    seed: int = 0,
) -> Loss:
    """Run a contender that was made of a schedule (at level `none`) on seeded images.

    Raises what running raises; `UsageError` for weights that give no finite result in float64 or
    in the precision; `UnknownName` for a precision that is not stored in floating point;
    `ShapeError` for an output of another shape.
    """
    batch, precision = contender.shape[0], precision_of(contender.precision)
    allowance = Allowance.of(precision, multiple(_algorithms(runner)))
    images = seeded_images(schedule, min(batch, IMAGES), seed).values
    filled = np.arange(batch) % len(images)
    with kernel_running():
        runner.load(images[filled])
        runner.run()
        got = runner.fetch()
    level = contender.fusion if contender.fusion in FUSION_LEVELS else "none"
    walk = pytorch_walk(schedule, fuse(schedule, level), weights, precision)
    value = schedule.output
    own = walk(images, [value]).take(value)[filled]
    expected = reference_walk(schedule, weights, images, [value]).take(value)[filled]
    if got.shape != expected.shape:
        raise ShapeError(
            f"'{contender.name}' put out {got.shape}, '{schedule.name}' makes it {expected.shape}"
        )
    sums = LossSums()
    sums.add_own(own, expected)
    sums.add(got, expected, 0)
    return sums.loss(allowance)


def judge_of(
    schedule: Schedule, weights: Mapping[str, Array], precisions: Iterable[str]
) -> Callable[[Contender, Runner], float]:
    """The `judge` of `r18.bench.bench`: each contender's loss in parts of what it may lose.

    Raises `UnknownName` for a precision that it could not judge, before anything is timed.
    """
    for name in precisions:
        Allowance.of(precision_of(name), 1)

    def judge(contender: Contender, runner: Runner) -> float:
        loss = output_loss(contender, runner, schedule, weights)
        return loss.ratio if loss.nonfinite == 0 else np.inf

    return judge


def _algorithms(runner: Runner) -> set[str]:
    """Those that kernels declare; a peer declares none."""
    steps = runner.program.plan.steps if isinstance(runner, Compiled) else ()
    return {step.kernel.contract.algorithm for step in steps}


__all__ = ["IMAGES", "judge_of", "output_loss"]
