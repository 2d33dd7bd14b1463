"""Time a network with the code of several checkouts in turns, to see differences of one percent.

python tools/compare_trees.py TREE TREE… [--backend numba-cpu] [--network resnet18]
    [--weights synthetic] [--precision bf16] [--batch 1] [--rounds 30] [--milliseconds 100]
    [--steps]

`git worktree add ../before REVISION` makes a tree to compare with. Each tree runs in a process of
its own, with this interpreter. Between its turns a process is stopped (SIGSTOP), so that no thread
of it waits on a core. Printed are each tree's median time of a run, and the median and the
quartiles of its times over those of the first tree in the same round. --steps: the medians of all
steps too, each timed by itself (`Program.profile`). Needs a POSIX system.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tabulate import tabulate

from r18.cli.app import REFUSED
from r18.errors import UsageError

PACKAGES = (".", "backends", "oracle")  # of a checkout
WARMUP, PROFILES = 3, 3

PASSED = ("backend", "network", "weights", "precision", "batch", "milliseconds")
"""The options of a tree's process."""


# -- in a process of its own -------------------------------------------------------------------


def serve(asked: argparse.Namespace) -> None:
    """Compile, then write a line with the times of a turn for each line that comes in."""
    import numpy as np

    from r18.backend import CompileOptions
    from r18.backend.registry import get_backend
    from r18.graph.resnet import network
    from r18.weights import load_weights
    from r18.weights.precisions import in_precision

    schedule = network(asked.network)
    options = CompileOptions(batch=asked.batch, precision=asked.precision)
    weights = load_weights(asked.weights, schedule)
    program = get_backend(asked.backend).compile(*in_precision(schedule, weights, options), options)
    shape = program.plan.tensors[program.plan.schedule.input].shape
    program.load(np.random.default_rng(0).standard_normal(shape).astype(np.float32))

    def run() -> float:
        start = time.perf_counter()
        program.launch()
        program.synchronize()
        return time.perf_counter() - start

    once = median(run() for _ in range(WARMUP))
    count = max(1, round(asked.milliseconds / 1e3 / once))
    names = [f"{step.step} {step.phase}".rstrip() for step in program.profile()]
    print(json.dumps(names), flush=True)
    for _ in sys.stdin:
        steps: list[list[float]] = []
        if asked.steps:
            profiles = [program.profile() for _ in range(PROFILES)]
            steps = [[1e3 * step.milliseconds for step in profile] for profile in profiles]
        total = 1e6 * median(run() for _ in range(count))
        print(
            json.dumps([total, [median(times) for times in zip(*steps, strict=True)]]), flush=True
        )


# -- in turns ----------------------------------------------------------------------------------


@dataclass
class Tree:
    """A checkout and its process. steps: their names; turns: (microseconds of a run, of steps)."""

    name: str
    process: subprocess.Popen[str]
    steps: list[str]
    turns: list[tuple[float, list[float]]]

    def read(self) -> Any:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise UsageError(f"{self.name} ended with exit code {self.process.wait()}")

    def take_turn(self) -> None:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        print(file=self.process.stdin, flush=True)
        self.turns.append(self.read())
        self.process.send_signal(signal.SIGSTOP)


@contextmanager
def started(path: Path, arguments: Sequence[str]) -> Iterator[Tree]:
    """The tree at a path, compiled and stopped. Its process ends with the context."""
    if not (path / "r18" / "__init__.py").is_file():
        raise UsageError(f"{path} is no checkout: it has no r18/__init__.py")
    root = path.resolve()
    found = os.pathsep.join(str(root / package) for package in PACKAGES)
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", *arguments],
        env={**os.environ, "PYTHONPATH": found},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        tree = Tree(str(path), process, [], [])
        tree.steps = tree.read()
        process.send_signal(signal.SIGSTOP)
        yield tree
    finally:
        process.kill()  # ends a stopped process too
        process.communicate()


def compare(paths: Sequence[Path], arguments: Sequence[str], rounds: int) -> list[Tree]:
    """Each tree's turns. Each round has one of every tree, and the next one begins with another."""
    with ExitStack() as running:
        trees = [running.enter_context(started(path, arguments)) for path in paths]
        for turn in range(rounds):
            first = turn % len(trees)
            for tree in (*trees[first:], *trees[:first]):
                tree.take_turn()
        return trees


def report(trees: Sequence[Tree]) -> str:
    """The table of runs, and that of steps if they were timed."""
    base = trees[0]
    rows = []
    for tree in trees:
        times = [total for total, _ in tree.turns]
        ratios = [mine / its for mine, (its, _) in zip(times, base.turns, strict=True)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append([tree.name, f"{median(times):,.1f}", f"{middle:.3f}", f"{low:.3f}-{high:.3f}"])
    text = _table(rows, ["tree", "µs a run", "of the first", "quartiles"])
    if not base.turns[0][1]:
        return text
    named = [
        {name: [turn[1][at] for turn in tree.turns] for at, name in enumerate(tree.steps)}
        for tree in trees
    ]
    steps = [
        [name, *(f"{median(one[name]):,.1f}" if name in one else "" for one in named)]
        for name in base.steps
    ]
    return f"{text}\n\n{_table(steps, ['step, µs', *(tree.name for tree in trees)])}"


def _table(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> str:
    align = ["left", *["right"] * (len(heads) - 1)]
    return tabulate(rows, heads, disable_numparse=True, colalign=align)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="numba-cpu")
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--weights", default="synthetic")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a turn")
    parser.add_argument("--steps", action="store_true", help="time each step too")
    asked = parser.parse_args(arguments)
    if asked.serve:
        serve(asked)
        return 0
    if len(asked.trees) < 2 or asked.rounds < 1 or asked.batch < 1 or asked.milliseconds <= 0:
        parser.error("needs two trees, and rounds, a batch and a turn above 0")
    passed = [f"--{name}={getattr(asked, name)}" for name in PASSED]
    try:
        trees = compare(asked.trees, [*passed, *["--steps"] * asked.steps], asked.rounds)
    except UsageError as error:
        print(error, file=sys.stderr)
        return REFUSED
    print(report(trees))
    return 0


if __name__ == "__main__":
    sys.exit(main())
