"""Inner loops found in assembly, and the table of them. No time counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commands import r18
from r18.backend import Ceiling, HostCode, Kernel, Pace
from r18.backend.registry import load_backend
from r18.cli.app import REFUSED
from r18.graph.ops import Conv2d, Linear, Problem
from r18.inner_loops import inner_loops, look, peak

NESTED = """
kernel:
\tpushq\t%rbp
.LBB0_1:                                # =>This Loop Header: Depth=1
\tvfmadd231ps\t%zmm0, %zmm1, %zmm9
\tmovq\t%rax, 8(%rsp)                  # 8-byte Spill
.LBB0_2:                                #   Parent Loop BB0_1 Depth=1
\tvmovups\t%zmm3, 64(%rsp)             # 64-byte Spill
\tvfmadd231ps\t(%rax), %zmm1, %zmm2
\tvfmadd213ps\t64(%rsp), %zmm1, %zmm3  # 64-byte Folded Reload
\tvfmadd231ps\t(%rbx), %zmm1, %zmm4    # a remark
\tjne\t.LBB0_2
\t.p2align\t4
.LBB0_3:
\tvfmadd231ps\t(%rax), %zmm1, %zmm2
\tje\t.LBB0_4
\taddq\t$1, %rax
\tjmp\t.LBB0_3
.LBB0_4:
\taddq\t$1, %rcx
\tcmpq\t%rcx, %rdx
\tjne\t.LBB0_1
.LBB0_5:
\taddq\t$1, %rcx
\tjne\t.LBB0_5
\tretq
"""
WITH_EPILOGUE = """
.LBB2_1:
\ttdpbusd\t%tmm6, %tmm4, %tmm0
\tmovq\t8(%rsp), %rax                  # 8-byte Reload
.LBB2_2:
\tvmovups\t%zmm3, 64(%rsp)             # 64-byte Spill
\tjne\t.LBB2_2
\taddq\t$1, %rcx
\tjne\t.LBB2_1
"""
ARM = """
LBB3_7:
\tldr\tq0, [x1], #16                     // 16-byte Folded Reload
\tfmla\tv1.4s, v0.4s, v2.4s
\tsubs\tx3, x3, #1
\tb.ne\tLBB3_7
"""


def test_only_innermost_loops_that_multiply() -> None:
    first, second = inner_loops(HostCode("vfmadd231ps", NESTED))
    assert (first.products, first.instructions, first.spills, first.reloads) == (2, 5, 1, 1)
    assert [line.split()[0] for line in first.lines] == [
        ".LBB0_2:", "vmovups", "vfmadd231ps", "vfmadd213ps", "vfmadd231ps", "jne"
    ]  # fmt: skip
    assert [line.partition("#")[2].strip() for line in first.lines] == [
        "", "64-byte Spill", "", "64-byte Folded Reload", "", ""
    ]  # fmt: skip
    # A loop with two jumps back to it or out of it is still one loop.
    assert (second.products, second.instructions, second.spills) == (1, 4, 0)
    assert inner_loops(HostCode("vpdpbusd", NESTED)) == ()


def test_a_loop_that_does_not_multiply_is_left_out_of_one_that_does() -> None:
    (loop,) = inner_loops(HostCode("tdpbusd", WITH_EPILOGUE))
    assert (loop.products, loop.instructions, loop.spills, loop.reloads) == (1, 4, 0, 1)
    assert [line.split()[0] for line in loop.lines] == [
        ".LBB2_1:", "tdpbusd", "movq", "addq", "jne"
    ]  # fmt: skip


def test_other_assemblers() -> None:
    (loop,) = inner_loops(HostCode("fmla", ARM))
    assert (loop.products, loop.instructions, loop.spills, loop.reloads) == (1, 4, 0, 1)


class Coded:
    """A backend whose matmul kernels have assembly from this test, and instruction rates."""

    def __init__(self, rate: float) -> None:
        self.inner = load_backend("numpy")
        self.rate = rate
        self.asked: list[Problem] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def host_code(self, kernel: Kernel, problem: Problem) -> HostCode | None:
        self.asked.append(problem)
        return HostCode("vfmadd231ps", NESTED) if kernel.algorithm == "matmul" else None

    def ceilings(self, progress: Any) -> tuple[Ceiling, ...]:
        pace = Pace(self.rate / 2, self.rate, 3)
        return (Ceiling("vfmadd231ps", "fp32", pace, pace, "repeated"),)


def test_a_kernel_is_seen_on_the_network_s_largest_problem() -> None:
    backend: Any = Coded(1e9)
    kernels = [k for k in backend.kernels() if k.precision.name == "fp32"]
    result = look(backend, kernels)
    (seen,) = result.kernels
    assert (seen.kernel, seen.share) == ("numpy/linear/matmul/fp32", None)
    assert isinstance(seen.problem.op, Linear)
    of_convs = {problem for problem in backend.asked if isinstance(problem.op, Conv2d)}
    assert {problem.inputs[0] for problem in of_convs} == {(8, 64, 56, 56)}
    text = result.text()
    assert "    vfmadd213ps    64(%rsp), %zmm1, %zmm3  # 64-byte Folded Reload" in text
    assert text.splitlines()[-1].split() == [
        "numpy/linear/matmul/fp32", "vfmadd231ps", "2", "2", "5", "1", "1"
    ]  # fmt: skip


def test_the_share_is_of_the_best_rate() -> None:
    backend: Any = Coded(1e9)
    (kernel,) = (k for k in backend.kernels() if k.id == "numpy/linear/matmul/fp32")
    first, second = (look(Coded(rate), [kernel], measure=True) for rate in (1e9, 1e3))  # type: ignore[arg-type]
    share = first.kernels[0].share
    assert share is not None
    assert share.ratio == share.reached / 1e9 > 0
    assert first.text().splitlines()[-1] == "peak 1.0 GFLOP/s: repeated"
    assert first.text().splitlines()[-3].split()[-1] == f"{share.ratio:.0%}"
    other = second.to_json()[0]
    assert other["share"] == other["operations_per_second"] / 1e3
    assert other["loops"][0]["products"] == 2
    json.dumps(second.to_json())


def test_a_peak_is_the_instruction_s_else_the_precision_s() -> None:
    kernel = load_backend("numpy").kernels()[0]
    assert kernel.precision.name == "fp32"

    def ceiling(what: str, precision: str, rate: float) -> Ceiling:
        return Ceiling(what, precision, Pace(rate, rate, 1), Pace(1, 1, 1), "")

    every = [ceiling("a", "int8", 9), ceiling("b", "fp32", 7), ceiling("c", "fp32", 8)]
    assert [peak(HostCode(name, ""), kernel, every) for name in "abd"] == [9, 7, 8]
    assert peak(HostCode("d", ""), kernel, every[:1]) is None


def test_kernels_without_machine_code_are_refused() -> None:
    done = r18("kernels", "--backend", "numpy", "--assembly")
    assert done.code == REFUSED
    assert "of 'numpy' is compiled for the CPU and multiplies in ResNet-18" in done.err


def test_no_other_backend_has_any() -> None:
    for name in ("numpy", "cupy", "numba"):
        backend = load_backend(name)
        problem = Problem(Linear(2, 3), ((1, 2),))
        assert backend.host_code(backend.kernels()[0], problem) is None


@pytest.mark.parametrize("backend", ["numpy"])
def test_without_measuring_no_rate_is_asked_for(backend: str) -> None:
    coded: Any = Coded(0.0)
    coded.ceilings = lambda progress: pytest.fail("measured")
    look(coded, [k for k in coded.kernels() if k.id == f"{backend}/linear/matmul/fp32"])
