"""The network next to PyTorch in eager mode, in float32, one image at a time, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from r18.backend import Array, DeviceInfo, Program, StepTime
from r18.bench.baselines import PEER
from r18.bench.contenders import Compiled
from r18.bench.error import Error, relative
from r18.bench.rows import Contender, Row, Runner
from r18.bench.run import Result, reason
from r18.bench.timing import Rounds, bench, random_images
from r18.demo.heavy import Made
from r18.demo.part import Part
from r18.demo.second import Second
from r18.errors import BackendUnavailable
from r18.graph.schedule import Schedule
from r18.machine import machine

ROUNDS = Rounds(warmup=1, repeat=5)
IMAGES = 1
"""The images by which the errors are measured, in float64 on the CPU: 0.3 s each."""
TITLE = "speed, float32, one image at a time"
SHOWN = "PyTorch, eager mode"


class Apart:
    """PyTorch's runner in the second process; its times are by that process's clock.

    made: the answer of `Heavy.make`, which was asked for. See `r18.bench.rows.Runner`.
    """

    arena_nbytes = None
    kernels: Mapping[str, int] = {}

    def __init__(self, second: Second, made: Made) -> None:
        self._second = second
        self.weight_nbytes = made.weight_nbytes

    def load(self, images: Array) -> None:
        self._second.call("load", images)

    def run(self) -> None:
        self._second.call("run")

    def fetch(self) -> Array:
        output: Array = self._second.call("fetch")
        return output

    def time(self, clock: Callable[[], float]) -> float:
        return float(self._second.call("time"))

    def steps(self) -> list[StepTime]:
        return []

    def close(self) -> None:
        """The process is the demonstration's, which ends it."""


def images_for(schedule: Schedule) -> list[Array]:
    """Batches of one image, by which the errors are measured."""
    return random_images((1, *schedule.input_shape), IMAGES, seed=1)


def speed(
    asked: str, device: DeviceInfo, program: Program, images: list[Array], second: Second
) -> Part:
    """The part. asked: for the backend. program: timed, and closed.

    second: the call of `Heavy.make` with the images is open.
    """
    exact: list[Array] = []

    def peer() -> Runner:
        answer = second.answer()
        if isinstance(answer, str):
            raise BackendUnavailable(SHOWN, answer)
        exact.extend(answer.exact)
        return Apart(second, answer)

    def error_of(contender: Contender, runner: Runner) -> Error:
        if not exact:
            raise BackendUnavailable(SHOWN, "it is what errors are measured against")
        got = [_output(runner, batch) for batch in images]
        return Error(relative(np.concatenate(got), np.concatenate(exact)), len(images))

    theirs = DeviceInfo(device.kind, SHOWN)
    shape = images[0].shape
    contenders = [
        Contender(PEER, theirs, "fp32", "eager", shape, peer, required=False),
        Contender(
            *(program.plan.backend, device, "fp32", program.plan.options.fusion, shape),
            lambda: Compiled(program, device.kind),
        ),
    ]
    left_out: list[str] = []
    rows = bench(
        contenders,
        **asdict(ROUNDS),
        error_of=error_of,
        on_skip=lambda contender, error: left_out.append(f"left out: {SHOWN}: {reason(error)}"),
    )
    return part_of(Result(rows[::-1], [], {"machine": machine()}, ()), left_out, asked)


def _output(runner: Runner, images: Array) -> Array:
    runner.load(images)
    runner.run()
    return runner.fetch()


def part_of(result: Result, left_out: list[str], asked: str) -> Part:
    """The times in words. asked: for the backend."""
    lines = [_row(row) for row in result.rows]
    own = result.rows[0]
    if own.ratio is not None:
        lines.append(
            f"{own.backend} runs at {1 / own.ratio:.2f} times the speed of PyTorch, by medians of "
            f"{ROUNDS.repeat} runs in turns: a first impression; r18 bench measures"
        )
    if own.backend == "numpy" and asked == "auto":
        lines.append("numpy is the readable reference; pip install 'r18[numba]' compiles for CPUs")
    lines += [*left_out, *(f"warning: {it.replace(PEER, SHOWN)}" for it in result.warnings)]
    rows: list[dict[str, Any]] = [
        {
            "name": _name(row),
            "median_ms": row.median_ms,
            "p10_ms": row.p10_ms,
            "p90_ms": row.p90_ms,
        }
        for row in result.rows
    ]
    data = {"rows": rows, "time_over_pytorch": own.ratio, "left_out": left_out}
    return Part(TITLE, tuple(lines), data=data)


def _row(row: Row) -> str:
    spread = f"p10..p90 {row.p10_ms:.3g}..{row.p90_ms:.3g}"
    error = f", error {row.error.relative:.1e} against float64" if row.error else ""
    return f"{row.median_ms:8.3g} ms  {_name(row)} ({spread}{error})"


def _name(row: Row) -> str:
    return SHOWN if row.backend == PEER else row.backend


__all__ = ["ROUNDS", "SHOWN", "images_for", "part_of", "speed"]
