"""Campaigns: an intermittent fault is a finding, and corners are searched after drawn problems."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

import mutation_toy
from r18.backend import Array
from r18.backend.host import HostFunction, HostKernel
from r18.graph.ops import Add, Problem, ReLU
from r18_oracle.findings import Finding
from r18_oracle.generate.corners import corners
from r18_oracle.search.campaign import run_campaign
from r18_oracle.search.profiles import Profile, profile

QUICK = replace(profile("quick"), shrink_seconds=1.0)


WIDE = replace(profile("thorough"), examples=1, shrink_seconds=1.0)
"""The thorough profile's fixed problems, and a single drawn one."""


def finding_of(
    function: HostFunction,
    network: str | None = None,
    extra: tuple[Problem, ...] = (),
    how: Profile = QUICK,
) -> Finding | None:
    """The finding of a campaign on a ReLU that computes with `function`."""
    backend = mutation_toy.Backend()
    (kernel,) = backend.kernels()
    wrong: HostKernel = replace(kernel, run=function, extra_problems=extra)
    return run_campaign(backend, wrong, how, seed=0, network_name=network).finding


def test_a_fault_that_comes_and_goes_is_a_finding() -> None:
    calls = count()

    def flaky(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, space: Array) -> None:
        call = next(calls)
        if call % 3 == 1:
            raise MemoryError("now and then")
        np.maximum(inputs[0], 0, out=out)
        if call % 3 == 2:
            inputs[0][...] = 7

    finding = finding_of(flaky)
    assert finding is not None
    assert finding.check in ("runs", "inputs_unchanged")


def test_a_device_that_is_lost_is_told_with_the_problem_that_lost_it() -> None:
    """A lost device is reported with its problem; later calls raise, so nothing is shrunk."""
    lost: list[tuple[int, ...]] = []

    def once(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, space: Array) -> None:
        if out.size > 100:
            lost.append(out.shape)
        if lost:
            raise RuntimeError("an illegal memory access was encountered")
        np.maximum(inputs[0], 0, out=out)

    finding = finding_of(once)
    assert finding is not None
    assert finding.check == "runs"
    assert finding.problem is not None
    assert finding.problem.inputs[0] == lost[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_fault_beyond_an_edge_that_no_kernel_declares_is_found(axis: int) -> None:
    """A fault past an edge that no kernel declares, from row or column 120 on, is found."""

    def wrong(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, space: Array) -> None:
        np.maximum(inputs[0], 0, out=out)
        if out.ndim == 2:
            out.swapaxes(0, axis)[120:] = 1

    finding = finding_of(wrong, how=WIDE)
    assert finding is not None
    assert finding.problem is not None
    assert finding.problem.inputs[0][axis] > 120


def test_a_fault_on_a_corner_alone_is_found() -> None:
    width = max(p.inputs[0][-1] for p in corners(ReLU, QUICK.max_elements, QUICK.max_macs))

    def wrong(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, space: Array) -> None:
        np.maximum(inputs[0], out.shape[-1] == width, out=out)

    finding = finding_of(wrong)
    assert finding is not None
    assert finding.problem == Problem(ReLU(), ((1, width),))  # shrunk, though it was not drawn


def test_a_fault_on_a_road_that_the_kernel_names_is_found_and_shrunk() -> None:
    """A fault in a large problem that only the kernel itself names is found and shrunk."""

    def wrong(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, space: Array) -> None:
        np.maximum(inputs[0], out.size > 100_000, out=out)

    assert finding_of(wrong) is None
    finding = finding_of(wrong, extra=(Problem(ReLU(), ((3, 70_000),)),))
    assert finding is not None
    assert finding.problem is not None
    (size,) = (math.prod(shape) for shape in finding.problem.inputs)
    assert 100_000 < size < 200_000


def test_a_road_that_the_kernel_does_not_take_is_a_finding() -> None:
    def right(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, space: Array) -> None:
        np.maximum(inputs[0], 0, out=out)

    road = Problem(Add(), ((1, 3), (1, 3)))
    assert finding_of(right, extra=(Problem(ReLU(), ((1, 3),)),)) is None
    finding = finding_of(right, extra=(road,))
    assert finding is not None
    assert finding.check == "declaration"
    assert finding.message == (
        f"it names {road} among its extra problems, but does not take it: computes relu, not add"
    )


def test_a_fault_on_the_network_alone_is_found_and_shrunk() -> None:
    def wrong(op: ReLU, inputs: tuple[Array, ...], weights: Any, out: Array, space: Array) -> None:
        np.maximum(inputs[0], out.size > 100_000, out=out)

    finding = finding_of(wrong, "resnet18")
    assert finding is not None
    assert finding.problem is not None
    assert finding.details["light"]
    (size,) = (math.prod(shape) for shape in finding.problem.inputs)
    assert 100_000 < size < 200_000
