"""The error of a benchmark's contenders, backends and baselines alike: see `r18.bench.error`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from r18.backend import Array, CompileOptions
from r18.bench.baselines import peers_precision
from r18.bench.baselines.ways import PEERS
from r18.bench.error import FLOAT64, INTEGERS, Error, relative
from r18.bench.rows import Contender, Runner
from r18.errors import ShapeError
from r18.graph.precision import INT8
from r18.graph.schedule import Schedule
from r18.weights.precisions import in_precision
from r18_oracle.judge.reference import kernel_running
from r18_oracle.network.checkpoints import seeded_images
from r18_oracle.network.reference_runs import reference_run

IMAGES = 8
"""Different images, whatever the batch: a smaller batch runs repeatedly, a larger one repeats
them."""
SEED = 0
"""The seed of the images."""


class OutputErrors:
    """The errors of outputs on the same seeded images; each reference is computed once.

    schedule: at level `none`.
    """

    def __init__(self, schedule: Schedule, weights: Mapping[str, Array]) -> None:
        self._schedule, self._weights = schedule, weights
        self._expected: dict[str, Array] = {}

    def of(self, contender: Contender, runner: Runner) -> Error:
        """Run a contender made from the schedule.

        A baseline in an int8 row that runs in another precision is compared with float64. Raises
        what running raises, `UsageError` for weights that give no finite result in float64,
        `WeightsError` for int8 with weights without a quantisation, and `ShapeError` for an output
        of another shape.
        """
        batch, precision = contender.shape[0], contender.precision
        if contender.name in PEERS:
            precision = peers_precision(precision, contender.device.kind)
        reference = INTEGERS if precision == INT8.name else FLOAT64
        expected = self._reference(reference)
        got = self._outputs(runner, batch)
        filled = expected[np.arange(len(got)) % IMAGES]
        if got.shape != filled.shape:
            raise ShapeError(
                f"'{contender.name}' put out {got.shape[1:]} per image, '{self._schedule.name}' "
                f"makes it {filled.shape[1:]}"
            )
        return Error(relative(got, filled), IMAGES, reference)

    def _outputs(self, runner: Runner, batch: int) -> Array:
        """The outputs of all images, batch by batch, and of the first ones again to fill it."""
        images = seeded_images(self._schedule, IMAGES, SEED).values
        found = []
        with kernel_running():
            for first in range(0, IMAGES, batch):
                runner.load(images[np.arange(first, first + batch) % IMAGES])
                runner.run()
                found.append(runner.fetch())
        return np.concatenate(found)

    def _reference(self, reference: str) -> Array:
        if reference not in self._expected:
            schedule, weights = self._schedule, self._weights
            if reference == INTEGERS:
                options = CompileOptions(precision=INT8.name)
                schedule, weights = in_precision(schedule, weights, options)
            images = seeded_images(self._schedule, IMAGES, SEED).values
            run = reference_run(schedule, weights, images, [schedule.output])
            self._expected[reference] = run.take(schedule.output)
        return self._expected[reference]


__all__ = ["IMAGES", "SEED", "OutputErrors"]
