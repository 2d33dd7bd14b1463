"""Variants of kernels that choose among functions: each is looked at, and a fault says of which."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest

import choosing_toy
from choosing_toy import EDGES
from r18.backend import Choosing, Kernel, variants
from r18.errors import UsageError
from r18.ops import Conv2d, Problem
from r18.registry import load_backend
from r18_cupy import Backend as Cupy
from r18_cupy.kernel import CudaKernel
from r18_oracle.campaign import KernelReport, profile, run_campaign, search
from r18_oracle.findings import KERNEL_VARIANT, Finding
from r18_oracle.lost import smallest
from r18_oracle.sanitized import exercise
from r18_oracle.tasks import campaign_job, finding_of, replay_finding
from r18_oracle.variants import SHARE, known_problems, shares
from r18_oracle.verify_text import kernel_json
from r18_oracle.worker import Pool

QUICK = replace(profile("quick"), shrink_seconds=2.0)
KERNEL = "toy/relu/choosing/fp32"


def report_of(backend: choosing_toy.Backend) -> KernelReport:
    (kernel,) = backend.kernels()
    name = f"choosing_toy:{type(backend).__name__}"
    return run_campaign(backend, kernel, QUICK, 0, backend_name=name, network_name=None)


def campaign(backend: choosing_toy.Backend) -> Finding | None:
    return report_of(backend).finding


def replayed(finding: Finding) -> Finding | None:
    return replay_finding(finding=finding, announce=lambda problem, kind, seed: None)


def test_a_backend_offers_variants_or_none() -> None:
    toy, numpy = choosing_toy.Backend(), load_backend("numpy")
    assert isinstance(toy, Choosing)
    assert [one.id for one in variants(toy, toy.kernels()[0])] == [f"{KERNEL}/{e}" for e in EDGES]
    assert not isinstance(numpy, Choosing)
    assert all(variants(numpy, kernel) == () for kernel in numpy.kernels())


def test_a_fault_of_what_is_chosen_for_large_problems_alone_is_found_on_a_small_one() -> None:
    """It is the kernel's, names the variant, is shrunk, and replayed to the bit."""
    assert campaign(choosing_toy.Backend()) is None
    finding = campaign(choosing_toy.Wrong())
    assert finding is not None
    assert (finding.kernel, finding.details[KERNEL_VARIANT]) == (KERNEL, f"{KERNEL}/many")
    assert finding.problem is not None
    assert 40 < math.prod(finding.problem.output) < 60
    assert f"  variant   {KERNEL}/many" in finding.describe().splitlines()
    assert replayed(finding) == finding
    assert replayed(replace(finding, backend="choosing_toy:Backend")) is None


def test_a_report_says_how_many_problems_each_variant_took() -> None:
    report = report_of(choosing_toy.Backend())
    took = kernel_json(report)["variants"]
    assert list(took) == [f"{KERNEL}/{part}" for part in EDGES]
    assert 0 < took[f"{KERNEL}/few"] < took[f"{KERNEL}/many"] < report.tally.problems
    backend = load_backend("numpy")
    plain = run_campaign(backend, backend.kernels()[0], QUICK, 0, network_name=None)
    assert kernel_json(plain)["variants"] == {}


def test_a_variant_that_is_gone_is_no_fault_that_is_gone() -> None:
    finding = campaign(choosing_toy.Wrong())
    assert finding is not None
    details = finding.details | {KERNEL_VARIANT: f"{KERNEL}/medium"}
    with pytest.raises(UsageError, match=f"{KERNEL}/medium, a variant that {KERNEL} does not have"):
        replayed(replace(finding, details=details))


def test_a_crash_of_a_variant_is_shrunk_and_replayed_though_nobody_says_whose_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pool(1) as pool:
        job = campaign_job("choosing_toy:Deadly", KERNEL, QUICK, 0, None)
        (outcome,) = pool.run([job])
        found = finding_of(outcome)
        assert found is not None
        assert (found.check, found.kernel) == ("crash", KERNEL)
        small = smallest(found, QUICK, pool)
    assert small.problem is not None
    assert 40 < math.prod(small.problem.output) < 60
    tried: list[str] = []

    def examine(backend: Any, kernel: Kernel, *rest: Any, **options: Any) -> None:
        tried.append(kernel.id)

    monkeypatch.setattr("r18_oracle.campaign.examine", examine)
    assert replayed(small) is None
    assert tried == [KERNEL, f"{KERNEL}/few", f"{KERNEL}/many"]


def test_a_variant_gets_fewer_examples_and_the_edges_that_not_all_have() -> None:
    backend = choosing_toy.Backend()
    (kernel,) = backend.kernels()
    asked = dict(shares(backend, kernel, QUICK))
    few, many = variants(backend, kernel)
    assert [how.examples for how in asked.values()] == [15, 15 // SHARE, 15 // SHARE]
    assert known_problems(backend, kernel, few, QUICK) == ()
    widths = {p.inputs[0][-1] for p in known_problems(backend, kernel, many, QUICK)}
    assert {50, 51} & widths
    assert not {4, 5} & widths
    assert known_problems(backend, kernel, kernel, QUICK)


def test_a_sanitizer_hears_of_variants_too() -> None:
    seen: dict[str, int] = {}

    class Counting(choosing_toy.Backend):
        @staticmethod
        def second(*call: Any) -> None:
            seen["many"] = seen.get("many", 0) + 1
            choosing_toy.relu(*call)

    backend = Counting()
    taken = exercise(backend, backend.kernels()[0], QUICK, 0, None)
    assert 5 < seen["many"] < taken


# -- those of cupy -----------------------------------------------------------------------------

CUPY = Cupy()


def choosing() -> list[CudaKernel]:
    found = [kernel for kernel in CUPY.kernels() if variants(CUPY, kernel)]
    assert len(found) >= 14
    return cast(list[CudaKernel], found)


@pytest.mark.parametrize("kernel", choosing(), ids=lambda kernel: kernel.id)
def test_a_variant_is_its_kernel_with_one_function(kernel: CudaKernel) -> None:
    every = cast(tuple[CudaKernel, ...], variants(CUPY, kernel))
    assert every is variants(CUPY, kernel)
    assert len({one.id for one in every}) == len(every) > 1
    assert {one.id.rpartition("/")[0] for one in every} == {kernel.id}
    assert not {one.id for one in every} & {one.id for one in CUPY.kernels()}
    assert [one.entries() for one in every] == [(entry,) for entry in kernel.entries()]
    assert {(one.contract, one.op, one.batch_invariant) for one in every} == {
        (kernel.contract, kernel.op, kernel.batch_invariant)
    }


def test_every_function_of_every_kernel_is_launched_by_the_quick_profile() -> None:
    """What none of its problems chooses would be verified by nobody."""
    launched, every = set(), set()
    for kernel in cast(tuple[CudaKernel, ...], CUPY.kernels()):
        every |= set(kernel.entries())
        for one, share in shares(CUPY, kernel, QUICK):

            def call(problem: Problem, *how: Any, one: Any = one) -> bool:
                if one.refusal(problem) is not None:
                    return False
                launched.update(launch.entry for launch in one.launches(problem))
                return True

            search(one, share, 0, call)
            for problem in known_problems(CUPY, kernel, one, QUICK):
                call(problem)
    assert [entry.label for entry in every - launched] == []


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in choosing() if kernel.op is Conv2d and "wgmma" in kernel.id],
    ids=lambda kernel: kernel.id,
)
def test_tiles_are_filled_and_sums_have_a_step_for_each_of_their_parts(kernel: CudaKernel) -> None:
    """Of a convolution: a tile and a bit of rows and of columns, with all that is fused."""
    for one in cast(tuple[Any, ...], variants(CUPY, kernel)):
        (tile,) = one.tiles
        taken = [
            problem
            for problem in known_problems(CUPY, kernel, one, profile("thorough"))
            if one.refusal(problem) is None
        ]
        assert any(
            p.output[1] > tile.m and p.batch * p.output[2] * p.output[3] > tile.n and p.op.relu
            for p in taken
        )
        assert any(p.inputs[0][1] >= 2 * tile.parts * tile.k for p in taken)
