"""Choices of kernels that choose among functions: each is searched, and faults name theirs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import choosing_toy
from choosing_toy import EDGES, MANY
from r18.backend import DeviceInfo, Kernel
from r18.backend.registry import load_backend
from r18.errors import UsageError
from r18.graph.ops import Conv2d, ConvMaxPool, Problem, ReLU
from r18.graph.quantized import STORAGES, QuantizedAvgPoolLinear, QuantizedConv2d
from r18.graph.resnet import resnet18
from r18_cupy import Backend as Cupy
from r18_cupy.bytes.wgmma_halo import HALO_SHAPE
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.h200 import MULTIPROCESSORS
from r18_cupy.cuda.launch import GridLaunch
from r18_cupy.hopper.implicit_gemm_wgmma_stationary import StationaryTile
from r18_cupy.kernel import CudaKernel
from r18_oracle.conformance import test_backend as conformance
from r18_oracle.findings import CHOICE, Finding, load, save
from r18_oracle.generate.corners import corners, many_tiles
from r18_oracle.generate.problems import schedule_problems
from r18_oracle.generate.sizes import takes
from r18_oracle.sanitize.inside import exercise
from r18_oracle.search.campaign import KernelReport, network_problems, run_campaign, search
from r18_oracle.search.choices import SHARE, Share, geometry, shares
from r18_oracle.search.crashes import smallest
from r18_oracle.search.profiles import Profile, profile
from r18_oracle.search.replay import replay_finding
from r18_oracle.search.tasks import campaign_job, finding_of
from r18_oracle.search.verify import BackendResult, Request, Verification
from r18_oracle.search.verify_page import page
from r18_oracle.search.verify_text import kernel_json
from r18_oracle.search.worker import Pool

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


def test_a_backend_offers_choices_or_none() -> None:
    toy, numpy = choosing_toy.Backend(), load_backend("numpy")
    assert [one.id for one in toy.variants(toy.kernels()[0])] == [f"{KERNEL}/{e}" for e in EDGES]
    assert all(numpy.variants(kernel) == () for kernel in numpy.kernels())
    small, large = (Problem(ReLU(), ((rows, 1000),)) for rows in (1, MANY))
    (kernel,) = toy.kernels()
    chosen = [toy.variant(kernel, problem) for problem in (small, large)]
    assert chosen == list(toy.variants(kernel))
    assert numpy.variant(numpy.kernels()[0], small) is None


def test_the_conformance_suite_asks_what_is_chosen() -> None:
    asked: Any = SimpleNamespace(getoption=lambda name: "tiny")
    ask = conformance.test_variants_are_their_kernel_with_another_part_to_the_id

    class Silent(choosing_toy.Backend):
        def variant(self, kernel: Kernel, problem: Problem) -> Kernel | None:
            return None

    class Itself(choosing_toy.Backend):
        def variant(self, kernel: Kernel, problem: Problem) -> Kernel | None:
            return replace(self.kernels()[0], algorithm="another")

    ask(choosing_toy.Backend(), asked)
    with pytest.raises(AssertionError, match=r"takes relu.* and chooses nothing"):
        ask(Silent(), asked)
    with pytest.raises(AssertionError, match="toy/relu/another/fp32"):
        ask(Itself(), asked)


def test_a_fault_of_what_is_chosen_for_large_problems_alone_is_found_on_a_small_one() -> None:
    """A fault of the choice for large problems is the kernel's, names the choice, and is shrunk and
    replayed to the bit."""
    assert campaign(choosing_toy.Backend()) is None
    finding = campaign(choosing_toy.Wrong())
    assert finding is not None
    assert (finding.kernel, finding.details[CHOICE]) == (KERNEL, f"{KERNEL}/many")
    assert finding.problem is not None
    assert 40 < math.prod(finding.problem.output) < 60
    assert f"  choice    {KERNEL}/many" in finding.describe().splitlines()
    assert replayed(finding) == finding
    assert replayed(replace(finding, backend="choosing_toy:Backend")) is None


def test_a_report_says_how_many_problems_each_choice_took() -> None:
    report = report_of(choosing_toy.Backend())
    took = kernel_json(report)["choices"]
    assert list(took) == [f"{KERNEL}/{part}" for part in EDGES]
    few, many = took.values()
    assert min(few, many) > 0
    assert few + many < report.tally.problems
    said = f"{report.tally.problems} problems, {few + many} of its 2 choices, at least {few} each"
    shown = Verification(Request(QUICK), [BackendResult("toy", DeviceInfo("CPU", "one"), [report])])
    assert f'title="{said}"' in page(shown, about={})
    backend = load_backend("numpy")
    plain = run_campaign(backend, backend.kernels()[0], QUICK, 0, network_name=None)
    assert kernel_json(plain)["choices"] == {}


def test_a_choice_that_is_gone_is_no_fault_that_is_gone() -> None:
    finding = campaign(choosing_toy.Wrong())
    assert finding is not None
    details = finding.details | {CHOICE: f"{KERNEL}/medium"}
    with pytest.raises(UsageError, match=f"{KERNEL}/medium, a choice that {KERNEL} does not have"):
        replayed(replace(finding, details=details))


def test_a_crash_of_a_choice_is_shrunk_and_replayed_though_nobody_says_whose_it_was(
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

    monkeypatch.setattr("r18_oracle.search.replay.examine", examine)
    assert replayed(small) is None
    assert tried == [KERNEL, f"{KERNEL}/few", f"{KERNEL}/many"]


def test_a_choice_gets_fewer_examples_another_seed_and_edges_that_not_all_have() -> None:
    backend = choosing_toy.Backend()
    (kernel,) = backend.kernels()
    few, many = backend.variants(kernel)
    every = list(shares(backend, kernel, QUICK, 7))
    asked = [(share.one, share.how.examples, share.seed) for share in every]
    assert asked == [(kernel, 15, 7), (few, 15 // SHARE + 1, 8), (many, 15 // SHARE + 1, 9)]
    of_kernel, of_few, of_many = every
    widths = {p.inputs[0][-1] for p in of_many.known}
    assert {50, 51} & widths
    assert not {4, 5} & widths
    assert {4, 5} & {p.inputs[0][-1] for p in of_few.known}
    assert of_kernel.known


@pytest.mark.parametrize(("effort", "share"), [("brief", 3), ("quick", 2)])
def test_a_short_look_at_all_precisions_of_a_kernel_sees_every_problem(
    effort: str, share: int
) -> None:
    """The precisions of a kernel together see every problem; each sees a different part."""
    backend, short = load_backend("torch"), profile(effort)
    kernels = [k for k in backend.kernels() if k.id.startswith("torch/conv2d/aten/")]
    seen = [next(shares(backend, kernel, short, 5)).known for kernel in kernels]
    every = next(shares(backend, kernels[0], replace(short, every=1, twins=1), 5)).known
    assert len(seen) >= 4
    room = 1 if effort == "brief" else len(many_tiles(Conv2d, short.max_elements, short.max_macs))
    assert all(0 <= len(part) - len(every) // share <= room for part in seen)
    assert len({frozenset(part) for part in seen}) >= share
    assert set().union(*seen) == set(every)


@pytest.mark.parametrize("named", ["numpy", "numba-cpu"])
def test_two_precisions_see_every_corner_in_quick(named: str) -> None:
    """Two precisions see every corner, and those with many tiles twice; a kernel without a
    twin sees all of them itself."""
    backend = load_backend(named)
    families: dict[str, list[Share]] = {}
    for kernel in backend.kernels():
        found = next(shares(backend, kernel, QUICK, 0))
        families.setdefault(found.twins[0].id, []).append(found)
    assert {1, 2} <= {len(family) for family in families.values()} <= {1, 2, 3}
    for name, family in families.items():
        alone = [replace(one, how=replace(QUICK, twins=1)).known for one in family]
        fixed = set(corners(family[0].one.op, QUICK.max_elements, QUICK.max_macs))
        assert set().union(*(one.known for one in family)) >= fixed.intersection(*alone), name
        fixed -= set(many_tiles(family[0].one.op, QUICK.max_elements, QUICK.max_macs))
        parts = sum(len(fixed.intersection(one.known)) for one in family[:2])
        assert parts == len(fixed.intersection(alone[0])), name


@pytest.mark.parametrize(
    ("named", "kernel"),
    [
        ("torch", "torch/conv2d/aten/"),
        ("torch", "torch/relayout/aten/"),
        ("numpy", "numpy/qconv2d/im2col/int8"),
    ],
)
@pytest.mark.parametrize("effort", ["brief", "quick"])
def test_a_short_look_at_the_network_sees_every_geometry(
    named: str, kernel: str, effort: str
) -> None:
    """Each precision sees every geometry of the network, and all together every problem; a kernel
    in integers sees all bit widths."""
    backend, short = load_backend(named), profile(effort)
    network = network_problems("resnet18", (1,))
    kernels = [k for k in backend.kernels() if k.id.startswith(kernel)]
    every = [(i, p) for i, p in enumerate(network) if type(p.op) is kernels[0].op]
    kernels = [k for k in kernels if any(takes(k, p) for _, p in every)]  # tf32 needs a GPU
    seen = [list(Share(kernel, short, 5).of_network(network)) for kernel in kernels]
    for kernel_of, part in zip(kernels, seen, strict=True):
        assert {geometry(p) for _, p in part} == {geometry(p) for _, p in every}
        assert set(part) <= set(every)
        assert len(part) < len(every)
        whole = list(Share(kernel_of, profile("ci"), 5).of_network(network))
        assert whole == every
    if len(kernels) > 1:
        assert set().union(*seen) >= {(i, p) for i, p in every if takes(kernels[0], p)}
    else:
        assert {p.op.bits for _, p in seen[0]} == {8, 4, 2}
        for name in ("residual", "relu"):
            wanted = {getattr(p.op.conv, name) for _, p in every}
            assert {getattr(p.op.conv, name) for _, p in seen[0]} == wanted


def test_a_choice_that_takes_nothing_is_a_finding_until_it_does() -> None:
    finding = campaign(choosing_toy.Idle())
    assert finding is not None
    assert (finding.check, finding.kernel) == ("coverage", KERNEL)
    assert finding.message == (
        f"{KERNEL}/many, one of its choices, took none of the problems it was shown: not today"
    )
    assert replayed(finding) == finding
    assert replayed(replace(finding, backend="choosing_toy:Backend")) is None


def test_a_kernel_that_takes_nothing_is_refused_whatever_its_choices_take() -> None:
    backend = choosing_toy.Refusing()
    report = report_of(backend)
    assert (report.verdict, report.finding) == ("refused", None)
    assert report.tally.problems > 0
    assert list(report.tally.refused) == ["not me"]


def test_what_a_choice_refuses_its_kernel_does_not() -> None:
    report = report_of(choosing_toy.Picky())
    assert report.choices[f"{KERNEL}/many"].refused["not odd"] > 0
    assert report.tally.refused == {}
    assert report.tally.passed["exact"] > report.choices[f"{KERNEL}/many"].passed["exact"] > 0


def test_a_device_that_a_choice_lost_is_told_with_the_choice() -> None:
    finding = campaign(choosing_toy.Losing())
    assert finding is not None
    assert (finding.check, finding.details[CHOICE]) == ("runs", f"{KERNEL}/many")
    assert finding.problem is not None
    assert math.prod(finding.problem.output) > 40


def test_a_finding_on_a_choice_is_saved_and_read(tmp_path: Path) -> None:
    finding = campaign(choosing_toy.Wrong())
    assert finding is not None
    assert load(save(finding, tmp_path)) == finding


def test_a_sanitizer_hears_of_choices_too() -> None:
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
    found = [kernel for kernel in CUPY.kernels() if CUPY.variants(kernel)]
    assert len(found) >= 14
    return cast(list[CudaKernel], found)


@pytest.mark.parametrize("kernel", choosing(), ids=lambda kernel: kernel.id)
def test_a_choice_is_its_kernel_with_one_tile(kernel: CudaKernel) -> None:
    """A choice is its kernel with one tile: one function, or one per storage format of integers."""
    every = cast(tuple[CudaKernel, ...], CUPY.variants(kernel))
    assert every is CUPY.variants(kernel)
    assert len({one.id for one in every}) == len(every) > 1
    assert {one.id.rpartition("/")[0] for one in every} == {kernel.id}
    assert not {one.id for one in every} & {one.id for one in CUPY.kernels()}
    functions = [entry for one in every for entry in one.entries()]
    assert sorted(functions, key=repr) == sorted(kernel.entries(), key=repr)
    assert len(set(functions)) == len(functions)
    of_storages = kernel.op in (QuantizedConv2d, QuantizedAvgPoolLinear)
    per_choice = len(STORAGES) if of_storages else 1
    assert {len(one.entries()) for one in every} == {per_choice}
    assert {(one.contract, one.op, one.batch_invariant) for one in every} == {
        (kernel.contract, kernel.op, kernel.batch_invariant)
    }


@cache
def known(kernel: CudaKernel, how: Profile) -> dict[CudaKernel, list[Problem]]:
    """The fixed problems of campaigns that the kernel, and each of its choices, takes.

    Drawn problems come in addition; drawing them takes a second a kernel.
    """
    return {
        cast(CudaKernel, share.one): [p for p in share.known if share.one.refusal(p) is None]
        for share in shares(CUPY, kernel, how, 0)
    }


def drawn(kernel: CudaKernel, how: Profile) -> dict[CudaKernel, list[Problem]]:
    """The drawn problems of a campaign that the kernel, and each of its choices, takes."""
    found: dict[CudaKernel, list[Problem]] = {}
    for share in shares(CUPY, kernel, how, 0):
        taken = found.setdefault(cast(CudaKernel, share.one), [])

        def call(
            problem: Problem, *how: Any, one: Kernel = share.one, taken: list[Problem] = taken
        ) -> bool:
            if one.refusal(problem) is not None:
                return False
            taken.append(problem)
            return True

        search(share.one, share.how, share.seed, call)
    return found


def functions(taken: dict[CudaKernel, list[Problem]]) -> set[Entry]:
    return {
        launch.entry
        for one, problems in taken.items()
        for problem in problems
        for launch in one.launches(problem)
    }


def test_every_function_of_every_kernel_is_launched_by_the_quick_profile() -> None:
    """Every function is launched by its kernel, its choices, or choices that are kernels; otherwise
    nothing would verify it."""
    kernels = cast(tuple[CudaKernel, ...], CUPY.kernels())
    launched = {kernel.id: functions(known(kernel, QUICK)) for kernel in kernels}
    for kernel in kernels:
        own = (name for name in launched if name == kernel.id or name.startswith(f"{kernel.id}/"))
        idle = set(kernel.entries()).difference(*(launched[name] for name in own))
        if idle:
            idle -= functions(drawn(kernel, QUICK))
        assert [entry.label for entry in idle] == [], kernel.id


@pytest.mark.parametrize("batch", [1, 64])
def test_what_a_plan_says_is_chosen_is_what_is_launched(batch: int) -> None:
    """A plan's choice is the function that is launched, as a choice or as a kernel that has it."""
    own = {one.id: one for one in CUPY.kernels()}
    checked = 0
    for problem in schedule_problems(resnet18(), [batch]):
        for kernel in cast(tuple[CudaKernel, ...], CUPY.kernels()):
            if kernel.refusal(problem) is not None:
                continue
            one = cast(CudaKernel | None, CUPY.variant(kernel, problem))
            if one is None:
                assert not CUPY.variants(kernel), kernel.id
            else:
                assert one in CUPY.variants(kernel) or own[one.id] is one
                assert one.layout is kernel.layout, f"{one.id} is not {kernel.id} with one function"
                assert one.id.rpartition("/")[0] == kernel.id
                assert [launch.entry for launch in one.launches(problem)] == [
                    launch.entry for launch in kernel.launches(problem)
                ]
                checked += 1
    assert checked > 100


CONVOLUTIONS = [kernel for kernel in choosing() if kernel.op is Conv2d]
PERSISTENT = [
    kernel
    for kernel in choosing()
    if kernel.algorithm in ("implicit_gemm_wgmma", "implicit_gemm_wgmma_resident")
    and kernel.op is QuantizedConv2d
]
POOLED = [kernel for kernel in choosing() if kernel.op is ConvMaxPool]


@pytest.mark.parametrize("kernel", CONVOLUTIONS, ids=lambda kernel: kernel.id)
def test_tiles_are_filled_and_sums_have_a_step_for_each_of_their_parts(kernel: CudaKernel) -> None:
    """Tiles are filled: a tile and a bit of rows and columns, with all that is fused; tiles that
    hold too much only in the thorough profile. Tiles that keep weights in registers have a problem
    that fills all their chunks."""
    for one, taken in known(kernel, profile("thorough")).items():
        if one is not kernel:
            (tile,) = cast(Any, one).tiles
            stays = isinstance(tile, StationaryTile)
            assert any(
                p.output[1] > tile.m and p.batch * p.output[2] * p.output[3] > tile.n and p.op.relu
                for p in cast(list[Any], taken)
            )
            least = tile.groups_k * tile.k if stays else 2 * tile.parts * tile.k
            assert any(p.inputs[0][1] >= least for p in taken)


@pytest.mark.parametrize("kernel", CONVOLUTIONS, ids=lambda kernel: kernel.id)
def test_every_choice_that_stays_for_many_tiles_has_several(kernel: CudaKernel) -> None:
    for one, taken in known(kernel, QUICK).items():
        assert any(p.batch > 2 * MULTIPROCESSORS for p in taken), one.id


@pytest.mark.parametrize("kernel", PERSISTENT, ids=lambda kernel: kernel.id)
def test_every_block_of_integers_that_stays_has_several_tiles(kernel: CudaKernel) -> None:
    """Persistent integer blocks get several tiles, for each format, with a residual or without."""
    for one, taken in known(kernel, QUICK).items():
        (tile, *_) = cast(Any, one).tiles
        if tile.parts > 1:
            continue  # one tile a cluster
        several = {
            (p.op.stored[0], p.op.conv.residual)
            for p in cast(list[Any], taken)
            for launch in one.launches(p)
            if tiles_in(launch) > 2 * launch.grid[0]
        }
        assert {stored for stored, _ in several} == set(STORAGES), one.id
        assert {residual for _, residual in several} == {False, True}, one.id


def tiles_in(launch: GridLaunch) -> int:
    """The number of tiles that an integer convolution passes, in a struct or before K's."""
    *_, tiles, last = cast(tuple[Any, ...], launch.arguments)
    in_struct = last.nbytes == HALO_SHAPE.itemsize
    return int(last.view(HALO_SHAPE)["tiles"][0] if in_struct else tiles)


@pytest.mark.parametrize("kernel", POOLED, ids=lambda kernel: kernel.id)
def test_a_row_of_pooled_outputs_has_several_tiles(kernel: CudaKernel) -> None:
    for one, taken in known(kernel, QUICK).items():
        if one is not kernel:
            (tile,) = cast(Any, one).tiles
            assert any(tile.column_tiles(problem) > 1 for problem in taken), one.id
