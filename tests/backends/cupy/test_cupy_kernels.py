"""The CUDA kernels without a GPU: they compile, and their launches fit their functions."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from compiled import (
    Compiled,
    by_this_compiler,
    compile_now,
    compiled,
    label,
    recorded,
    targets,
    toolkit,
)
from cuda_support import entries, parameters, waits
from r18.backend import CompileOptions
from r18.backend.tuned import APART, read_table
from r18.graph.ops import Problem
from r18.graph.passes import FUSION_LEVELS
from r18.graph.resnet import resnet18, tiny
from r18.runtime.plan import make_plan
from r18_cupy import Backend
from r18_cupy.bytes.tensor_map import ByteMap
from r18_cupy.catalogue import all_kernels
from r18_cupy.choices import variants_of
from r18_cupy.cuda.compiler import Entry
from r18_cupy.cuda.launch import GridLaunch, Pointer, Role
from r18_cupy.cuda.tensor_map import Im2colMap, MatrixMap, PatchMap
from r18_cupy.kernel import CudaKernel
from r18_oracle.generate.problems import schedule_problems
from support import ROOT

KERNELS = all_kernels()
ENTRIES = entries()
SAMPLED = 32
"""One of every thirty-two recorded functions is compiled again."""
SPILLED = {
    (
        "conv2d_implicit_gemm-TILE_M=64-TILE_N=128-TILE_K=8-TILE_TM=8-TILE_TN=8-TILE_STAGES=3-"
        "TILE_BLOCKED=0",
        "sm_100",
    ): 44,
    (
        "conv2d_few_channels-TILE_M=224-TILE_N=64-TILE_K=7-TILE_BLOCKS=2-TILE_CHANNELS=4-POOL=0",
        "sm_120",
    ): 8,
}
"""The only spills of NVRTC 13.0, in bytes, on architectures that no tile was tuned for; 13.2
spills none of them there. Everything else spills nothing."""

TABLES = sorted((ROOT / "backends" / "r18_cupy" / "tuned").glob("*.json"))

EACH_KERNEL = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)


def check(found: Compiled, entry: Entry, target: str) -> None:
    name = f"{label(entry)} on {target}"
    assert found.registers > 0, name
    assert found.spill_nbytes <= SPILLED.get((label(entry), target), 0), f"{name} spills"
    assert not found.serialized, f"{name}: products in turn"


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_every_function_compiles_for_every_architecture_that_runs_it(entry: Entry) -> None:
    assert targets(entry)
    for target in targets(entry):
        check(compiled(entry, target), entry, target)


@pytest.mark.parametrize("entry", ENTRIES[::SAMPLED], ids=label)
def test_what_is_recorded_of_a_function_is_what_the_compiler_says(entry: Entry) -> None:
    if not recorded(entry):
        pytest.skip("compiled by the test above")
    for target in targets(entry):
        again = compile_now(entry, target)
        check(again, entry, target)
        assert not by_this_compiler(entry) or compiled(entry, target) == again, (
            f"{label(entry)} on {target}: delete tests/compiled.json, run tests/compiled.py"
        )


def test_what_is_recorded_of_other_sources_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES[0]
    kept = {"digest": entry.digest, "nvrtc": toolkit(), "targets": {"sm_90": {}}}
    for field, value, left, ours in (
        ("digest", entry.digest, {"sm_90": {}}, True),
        ("digest", "of other sources", {}, True),
        ("nvrtc", "another", {"sm_90": {}}, False),
    ):
        record = {label(entry): kept | {field: value}}
        monkeypatch.setattr("compiled._record", lambda record=record: record)
        assert recorded(entry) == left
        assert by_this_compiler(entry) == ours


@cache
def every_problem() -> list[Problem]:
    """The schedules' problems, at two batch sizes and every level.

    They include softmax and relayouts, which no step of a schedule names.
    """
    found = {
        problem
        for network in (tiny(), resnet18())
        for problem in schedule_problems(network, (1, 5))
    }
    return sorted(found, key=str)


@EACH_KERNEL
def test_launches_fit_their_functions(kernel: CudaKernel) -> None:
    """Launches pass the function's parameters with existing buffers, and use blocks of as many
    threads as it is compiled for. A block without its producers would wait for ever.
    """
    offered = (*every_problem(), *kernel.extra_problems)
    taken = [problem for problem in offered if kernel.refusal(problem) is None]
    assert taken, "no problem of any schedule"
    for problem in taken:
        launches = kernel.launches(problem)
        assert launches
        for launch in launches:
            assert launch.entry in kernel.entries()
            assert launch.overlaps == waits(launch.entry), launch.entry.symbol
            bound = compiled(launch.entry, targets(launch.entry)[0]).threads
            assert math.prod(launch.block) == bound, launch.entry.symbol
            check_arguments(launch, problem, kernel.workspace(problem), packed(kernel, problem))


def packed(kernel: CudaKernel, problem: Problem) -> int:
    """The most buffers that `prepare` makes; without weights, those of the op's own numbers."""
    return len(problem.op.weights()) or len(kernel.pack(problem, ()))


def check_arguments(launch: GridLaunch, problem: Problem, workspace: int, weights: int) -> None:
    kinds = parameters(launch.entry)
    assert len(kinds) == len(launch.arguments), launch.entry.symbol
    counts = {
        Role.INPUT: len(problem.inputs),
        Role.WEIGHT: weights,
        Role.OUTPUT: 1,
        Role.WORKSPACE: 1 if workspace else 0,
    }
    for kind, argument in zip(kinds, launch.arguments, strict=True):
        if isinstance(argument, Pointer):
            assert kind == "pointer"
            assert argument.index < counts[argument.role], argument
            assert argument.role is not Role.WORKSPACE or argument.offset < workspace
        elif isinstance(argument, MatrixMap | PatchMap | Im2colMap | ByteMap):
            assert kind == "TensorMap"
            assert argument.pointer.index < counts[argument.pointer.role], argument
        elif isinstance(argument, np.ndarray):
            assert isinstance(kind, str)
            assert kind != "pointer"
            assert argument.size == 1
        else:
            expected = np.uintp if kind == "pointer" else kind
            assert type(argument) is expected, f"{launch.entry.symbol}: {argument!r} for {kind}"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16x3", "fp16", "bf16"])
@pytest.mark.parametrize("level", FUSION_LEVELS)
def test_every_schedule_has_a_plan(precision: str, level: str) -> None:
    plan = make_plan(Backend(), resnet18(), CompileOptions(3, precision, level))
    assert all(step.workspace_nbytes >= 0 for step in plan.steps)
    assert math.prod(plan.tensors[plan.schedule.output].shape) == 3 * 1000


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tuned_tables_name_kernels(path: Path) -> None:
    """Plans pass over a name that no kernel has, so a renamed tile would lose its choice unseen."""
    known = {APART, *(kernel.id for kernel in KERNELS)}
    known |= {variant.id for kernel in KERNELS for variant in variants_of(kernel)}
    timings = [
        timing
        for problems in read_table(path).choices.values()
        for batches in problems.values()
        for timing in batches.values()
    ]
    assert len(timings) > 100
    assert {timing.kernel for timing in timings} <= known
