"""Every planted fault is caught, by the check that is meant to catch it, whatever the seed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from campaigns import IN_STATE, searched
from faults import FAULTS, TWINS, Backend, Fault, memory, quantized, rounds, state
from faults.cheats import CHEATS
from r18.backend.host import HostKernel
from r18.graph.ops import Problem
from r18.graph.quantized import MOST_DEPTH
from r18_oracle.check.checks import CHECKS
from r18_oracle.check.fence import fences_hold
from r18_oracle.findings import Finding
from r18_oracle.search.campaign import KernelReport
from r18_oracle.search.profiles import profile
from r18_oracle.search.replay import replay

SEEDS = (1, 2, 3)
"""The first one's finding is shrunk. `brief`, which runs on each change, has the second for some
faults, and not the last."""

BACKEND = Backend()
UNLOCATED = {
    *("declaration", "refusal", "runs", "guard_zones", "inputs_unchanged", "completion"),
    *("fences", "state"),
}
"""The checks that have no element of the output to point to."""
REMEMBERS = {
    "changing_order",
    "depends_on_the_previous_call",
    "workspace_grows",
    "refuses_every_other_time",
    *(fault.kernel.algorithm for fault in state.FAULTS),
}
"""Faults that do not fail the same way each time, and so cannot be replayed to the bit."""
SMALL = 3000
"""The largest number of elements of a shrunk problem, weights included."""
DEEP = {"fault/qconv2d/offset_weights/int8", "fault/qgap/float32_sum/int8"}
"""Faults that show only in the longest sums, of nearly `MOST_DEPTH` numbers."""
BY_THREE_CHECKS = {"fault/sconv2d/overflowing/fp8"}
"""Faults that more than two checks are meant to catch: NaN instead of the largest number shows
wherever an output is large."""
BEYOND_A_LIMIT = 100_000
"""The same for a fault whose problem must exceed the limit of a workspace."""
KEEPING = {kernel.id for kernel in (*state.TWINS, *memory.TWINS)}
"""Twins that keep something between calls."""


def campaign(
    fault: Fault, seed: int, shrink_seconds: float, with_state: bool = False
) -> KernelReport:
    """A fault's campaign. with_state: even if the fault is another check's, which `state` must not
    blame."""
    how = replace(profile("quick"), shrink_seconds=shrink_seconds)
    kernel = fault.kernel
    for fresh in state.planted():  # its caches are those of a fresh process
        kernel = fresh.kernel if fresh.kernel.id == kernel.id else kernel
    return searched(BACKEND, kernel, how, seed, with_state or "state" in fault.checks)


@pytest.fixture
def brief(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--r18-profile") == "brief")


def elements(problem: Problem) -> int:
    weights = [spec.shape for spec in problem.op.weights()]
    return sum(math.prod(shape) for shape in (*problem.inputs, *weights, problem.output))


def small(fault: Fault) -> int:
    """The largest number of elements of a fault's shrunk problem; a deep one needs more."""
    if fault in rounds.FAULTS:
        return BEYOND_A_LIMIT
    return SMALL + 3 * MOST_DEPTH * (fault.kernel.id in DEEP)


def seen_here(fault: Fault) -> None:
    if fault.checks == ("fences",) and not fences_hold():
        pytest.skip("this system does not tell what memory was touched")


def caught(finding: Finding | None, fault: Fault, seed: int) -> None:
    """The finding is that of a check that is meant to catch the fault."""
    assert finding is not None, f"escaped seed {seed}: {fault.wrong}"
    assert finding.check in fault.checks, finding.describe()
    assert finding.kernel == fault.kernel.id
    if fault in quantized.FAULTS:
        assert quantized.SAID.get(fault.kernel.algorithm, "") in finding.message
    if finding.check not in UNLOCATED:
        assert finding.problem is not None
        assert finding.coordinate is not None
        assert len(finding.coordinate) == len(finding.problem.output)
        assert finding.check == "full_write" or finding.got != finding.expected


@cache
def first(fault: Fault) -> Finding:
    """What the first seed finds, shrunk. Another check may be the first to fail on less."""
    longer = (profile("quick").shrink_seconds, 60.0)  # on a busy machine, and for a deep one
    for seconds in longer if fault.kernel.id in DEEP else (0.15, *longer):
        finding = campaign(fault, SEEDS[0], seconds).finding
        assert finding is not None, f"escaped seed {SEEDS[0]}: {fault.wrong}"
        assert finding.problem is not None
        if elements(finding.problem) <= small(fault):
            break
    return finding


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kernel.id)
def test_a_fault_is_caught_by_its_check_whatever_the_seed(fault: Fault, brief: bool) -> None:
    """In `brief` the first seed's finding is enough if its check is the fault's own, but for one in
    `IN_STATE` faults, which `state` must not blame."""
    seen_here(fault)
    in_state = FAULTS.index(fault) % IN_STATE == 0
    if brief and not in_state and first(fault).check in fault.checks:
        caught(first(fault), fault, SEEDS[0])
        return
    for seed in SEEDS[1 : 2 if brief else None]:
        caught(campaign(fault, seed, 0.0, not brief or in_state).finding, fault, seed)


def test_a_write_to_a_workspace_of_no_bytes_names_it() -> None:
    (fault,) = (one for one in FAULTS if "writes_to_a_workspace_of_no" in one.kernel.id)
    assert first(fault).message == "wrote to the workspace buffer, which has 0 bytes"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kernel.id)
def test_its_problem_is_shrunk_and_its_finding_replays(fault: Fault) -> None:
    seen_here(fault)
    finding = first(fault)
    assert finding.problem is not None
    assert elements(finding.problem) <= small(fault), finding.describe()
    if finding.kernel.split("/")[2] not in REMEMBERS:
        again = replay(BACKEND, finding)
        assert again is not None
        assert again.to_json() == finding.to_json()


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.id)
def test_the_same_kernel_without_its_fault_passes(twin: HostKernel, brief: bool) -> None:
    with_state = not brief or twin.id in KEEPING or TWINS.index(twin) % IN_STATE == 0
    report = searched(BACKEND, twin, profile("brief"), SEEDS[0], with_state)
    assert report.verdict == "ok", report.finding and report.finding.describe()
    assert report.tally.ratio <= 1


def test_there_are_faults_enough_and_for_every_check() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.kernel.id for fault in FAULTS}) == len(FAULTS)
    assert {fault.kernel.op for fault in FAULTS} == {twin.op for twin in TWINS}
    caught_by = {check for planted in (*FAULTS, *CHEATS) for check in planted.checks}
    assert caught_by == set(CHECKS)
    by_many = {planted.kernel.id for planted in (*FAULTS, *CHEATS) if len(planted.checks) > 2}
    assert by_many == BY_THREE_CHECKS
    assert all(1 <= len(planted.checks) <= 3 for planted in (*FAULTS, *CHEATS))
