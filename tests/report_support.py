"""Verifications made by hand, for the tests of the page of `r18 verify --html`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from page_reader import Reader
from r18.backend import DeviceInfo
from r18.graph.ops import Conv2d, Problem
from r18_oracle.check.tally import Tally
from r18_oracle.findings import Finding
from r18_oracle.judge.pictures import error_map
from r18_oracle.network.checkpoint_report import (
    CheckpointError,
    CheckpointReport,
    StepError,
    TopOne,
)
from r18_oracle.network.losses import Loss
from r18_oracle.search.campaign import KernelReport
from r18_oracle.search.profiles import profile
from r18_oracle.search.verify import BackendResult, Request, Verification
from r18_oracle.search.verify_page import page

CONV = Problem(Conv2d(3, 8, (3, 3), (1, 1), (1, 1)), ((2, 3, 9, 40),))
HOSTILE = "<script>alert(1)</script>&\"'\x00\ud800\x1b[31m"
ABOUT = {"versions": "none"}


def finding(**changes: Any) -> Finding:
    ratios = np.zeros(CONV.output)
    ratios[1, 5, :, 39] = 7.25
    ratios[1, 5, 4, 38] = 0.5
    values: dict[str, Any] = {
        "check": "bound",
        "backend": "ours",
        "kernel": "ours/conv2d/tiled/fp32",
        "problem": CONV,
        "kind": "normal",
        "seed": 3,
        "message": "error exceeds the bound (error/bound 7.25)",
        "coordinate": (1, 5, 0, 39),
        "got": 1.0,
        "expected": 1.5,
        "bound": 0.125,
        "details": {"picture": error_map(ratios, (1, 5, 0, 39))},
    }
    return Finding(**(values | changes))


def kernel(name: str, ratio: float = 0.25, **changes: Any) -> KernelReport:
    tally = Tally(12, Counter({"runs": 40, "exact": 12, "bound": 11}), Counter(), ratio, None, 1e-6)
    return KernelReport(name.partition("/")[0], name, tally, None, 4, 1.5, **changes)


def refusing(name: str) -> KernelReport:
    return replace(kernel(name), tally=Tally(refused=Counter({"no strides": 9})))


def failing(name: str, **changes: Any) -> KernelReport:
    return replace(kernel(name), finding=finding(kernel=name, **changes))


def step(name: str, ratio: float, **changes: Any) -> StepError:
    return StepError(
        name,
        "ours/conv2d/tiled/fp32",
        CONV,
        0,
        ratio,
        **{"sharp": 0.5, "coordinate": (0, 1, 2, 3), "got": 1.0, "expected": 1.0, "bound": 1e-6}
        | changes,
    )


def loss(relative: float, own: float = 1e-7, **changes: Any) -> Loss:
    numbers = {
        "max_abs": 1e-6,
        "rms": 2 * relative,
        "relative": relative,
        "cosine": 0.999999,
        "own_rms": 2 * own,
        "own_max": 1e-6,
        "own_relative": own,
        "allowed_rms": 16 * own,
        "allowed_max": 8e-6,
        "ratio": relative / (8 * own) if own else 0.0,
        "nonfinite": 0,
        "coordinate": (0, 1),
        "got": 1.0,
        "expected": 1.0,
    }
    return Loss(**(numbers | changes))


def run(
    backend: str, precision: str, ratios: dict[str, float], losses: dict[str, Loss]
) -> CheckpointReport:
    steps = tuple(step(name, ratio) for name, ratio in ratios.items())
    rows = tuple(
        CheckpointError(name, name, lost, None, tuple(ratios) if index == 0 else ())
        for index, (name, lost) in enumerate(losses.items())
    )
    top = TopOne(2, 1e-3, (), ())
    return CheckpointReport(
        backend, "tiny", precision, "all", 2, 2, "images", 8.0, rows, steps, top, ()
    )


def verification(results: list[BackendResult], **changes: Any) -> Verification:
    return Verification(Request(profile("quick"), **changes), results, 12.5)


def result(name: str, kernels: list[KernelReport], *runs: CheckpointReport) -> BackendResult:
    found = [report.finding for report in kernels if report.finding is not None]
    device = DeviceInfo("CPU", "a <fast> one")
    return BackendResult(name, device, kernels, list(runs), findings=found)


def clean() -> Verification:
    ratios = {"conv1": 0.0, "layer1.0.conv1": 0.02, "layer1.0.conv2": 0.99997, "fc": 0.3}
    losses = {"layer1": loss(1e-7), "logits": loss(3e-7), "output (no taps)": loss(0.0, 0.0)}
    ours = result(
        "ours",
        [kernel("ours/conv2d/tiled/fp32"), kernel("ours/relu/max/fp16", 0.0)],
        run("ours", "fp32", ratios, losses),
        run("ours", "fp16", {"pack": 0.0, **ratios}, losses),
    )
    ours.skipped["int8"] = "no int8 kernel takes conv1"
    ours.left_out = "the network 'tiny' only; its kernels with --backend ours"
    theirs = result(
        "theirs",
        [kernel("theirs/conv2d/tiled/fp32/8x8", 0.99997), refusing("theirs/add/one/fp32")],
        run("theirs", "fp32", {name: ratio / 2 for name, ratio in ratios.items()}, losses),
    )
    return verification([ours, theirs])


def faulty() -> Verification:
    ratios = {"conv1": 5.5, "layer1.0.conv1": math.inf, "fc": math.nan, "pool": 1.0001}
    losses = {
        "layer1": loss(0.3, ratio=4e5),
        "logits": loss(math.inf, rms=math.inf, max_abs=math.inf, ratio=math.inf, nonfinite=3),
        "output (no taps)": loss(math.nan, cosine=math.nan, ratio=math.nan),
    }
    crash = {"check": "crash", "problem": None, "details": {}, "coordinate": None, "bound": None}
    kernels = [
        failing("ours/conv2d/tiled/fp32"),
        failing("ours/gap/mean/fp32", message="died", **crash),
        failing("odd id"),
    ]
    ours = result("ours", kernels, run("ours", "fp32", ratios, losses))
    for extent in (4, 5):
        problem = Problem(Conv2d(3, 8, (1, 1)), ((1, 3, extent, extent),))
        ours.findings.append(finding(check="coverage", problem=problem, details={}))
    return verification([ours])


def hostile() -> Verification:
    name = f"{HOSTILE}/{HOSTILE}/{HOSTILE}/{HOSTILE}"
    bad = failing(name, message=HOSTILE, kind=HOSTILE, check=HOSTILE, backend=HOSTILE)
    other = refusing(name)
    other.tally.refused[HOSTILE] += 1
    device = DeviceInfo(HOSTILE, HOSTILE, {HOSTILE: HOSTILE})
    ratios, losses = {HOSTILE: 0.5}, {HOSTILE: loss(1e-7)}
    report = replace(run(HOSTILE, HOSTILE, ratios, losses), network=HOSTILE, fusion=HOSTILE)
    assert bad.finding is not None
    skipped, found = {HOSTILE: HOSTILE}, [bad.finding]
    ours = BackendResult(
        HOSTILE, device, [bad, other], [report], skipped, left_out=HOSTILE, findings=found
    )
    return verification([ours], network=HOSTILE, weights=HOSTILE, kernels=HOSTILE)


def empty() -> Verification:
    return verification([])


def nothing_ran() -> Verification:
    return verification([result("ours", [refusing("ours/add/one/fp32")])])


MADE = (clean, faulty, hostile, empty, nothing_ran)


@cache
def reader_of(make: Callable[[], Verification]) -> Reader:
    """The page of one of `MADE`, read once."""
    return read(make())


def read(made: Verification) -> Reader:
    return Reader(page(made, findings=Path("exports/findings"), about=ABOUT))
