"""The demo's second process: the oracle examines the planted bug, and PyTorch is timed."""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from r18.backend import Array
from r18.demo import planted
from r18.demo.layers import LayerByLayer
from r18.demo.part import Part
from r18.errors import BackendUnavailable, UsageError
from r18.graph.schedule import Schedule
from r18.hooks import hook
from r18.machine import cache_folder, keep_freed_memory
from r18.stopwatch import part

OPERATOR = "adaptive_avg_pool2d"
PLACE = f"{planted.__name__}:{planted.divides_by_one_less.__name__}"


@dataclass(frozen=True)
class Made:
    """PyTorch's runner. exact: its outputs in float64, for the images that it was made with."""

    weight_nbytes: int
    exact: tuple[Array, ...]


class Heavy:
    """One object for all calls: it keeps PyTorch's runner between them."""

    def __init__(self) -> None:
        keep_freed_memory()
        gc.disable()  # collections take an eighth of PyTorch's import, and this process is short
        # Else Hypothesis makes a folder where the user is.
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(cache_folder() / "hypothesis"))
        self._peer: LayerByLayer | None = None

    def bug(self) -> Part:
        """A global average that divides by H·W − 1 is judged, and then the same one mended."""
        with part("PyTorch imported"), suppress(ImportError):
            importlib.import_module("torch")
        begin = time.perf_counter()
        made = bug()
        return replace(made, seconds=time.perf_counter() - begin)

    def make(
        self,
        kind: str,
        schedule: Schedule,
        weights: Mapping[str, Array],
        images: Sequence[Array],
    ) -> Made | str:
        """PyTorch in eager mode on a kind of device, or why it cannot run there."""
        try:
            with part("PyTorch's network made"):
                self._peer = LayerByLayer(kind, schedule, weights, "fp32")
        except BackendUnavailable as error:
            return error.cause
        with part("PyTorch in float64"):
            exact = self._peer.exact(images)
        return Made(self._peer.weight_nbytes, tuple(exact))

    def load(self, images: Array) -> None:
        with part("PyTorch timed"):
            self._runner.load(images)

    def run(self) -> None:
        with part("PyTorch timed"):
            self._runner.run()

    def time(self) -> float:
        """Milliseconds of a run, by this process's clock or the device's events."""
        with part("PyTorch timed"):
            return self._runner.time(time.perf_counter)

    def fetch(self) -> Array:
        return self._runner.fetch()

    @property
    def _runner(self) -> LayerByLayer:
        assert self._peer is not None  # `make` comes first
        return self._peer


def bug() -> Part:
    """The part that finds the planted bug; in this process, since the kernels are known to end."""
    name = "a planted bug: a global average that divides by H·W − 1"
    try:
        with part("the oracle imported"):
            judge = hook("assert_kernel", "finding it")
    except UsageError as error:
        lines = ("left out:", *str(error).splitlines())
        return Part(name, lines, data={"left_out": str(error)})
    with part("a planted bug"):
        wrong = _finding(judge, planted.divides_by_one_less)
        right = _finding(judge, planted.mended)
    found = wrong or "NOT FOUND: the oracle is at fault, please report it"
    lines = (*found.splitlines(), "", f"again with: r18 check {PLACE} --like {OPERATOR}", "")
    if right:
        lines += ("A FALSE ALARM of the oracle, please report it:", *right.splitlines())
    else:
        lines += ("divided by H·W, it passes every check",)
    return Part(
        name, lines, ok=bool(wrong) and not right, data={"found": wrong, "false_alarm": right}
    )


def _finding(judge: Any, kernel: Callable[..., Any]) -> str:
    """The oracle's complaint about a kernel; "" if there is none."""
    try:
        judge(kernel, OPERATOR, arrays="numpy", profile="brief", network=None, isolated=False)
    except AssertionError as error:
        return str(error)
    return ""


__all__ = ["Heavy", "Made", "bug"]
