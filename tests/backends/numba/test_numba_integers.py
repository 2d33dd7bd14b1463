"""Integers on Numba CUDA: equal to numpy's in the simulator, and never fused on a GPU.

The simulator rounds each operation by itself whatever is written, so the tests read a GPU's
operations in the PTX.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import numba_compiled
import r18_numba
from integer_networks import assert_equals_numpy
from r18.graph.ops import Conv2d, Linear, Problem
from r18.graph.precision import INT8
from r18.graph.quantized import (
    QUANTIZED_OPS,
    QuantizedAvgPoolLinear,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedLinear,
)
from r18.graph.resnet import resnet18, tiny
from r18.runtime.launch import run_kernel
from r18_numba.catalogue import all_kernels, filling, simulated_kernels
from r18_numba.integers.conv import QuantizedImplicitGemm
from r18_numba.integers.kernel import IntegerKernel
from r18_numba.integers.linear import QuantizedLinearKernel
from r18_numba.others import LINEAR_TILES
from r18_numba.tile import LARGE, SMALL, TINY, WIDE, Tile
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge.verdict import judge


@pytest.fixture(scope="module")
def backend() -> r18_numba.Backend:
    found = r18_numba.Backend()
    found.probe()
    return found


def equals_the_reference(
    backend: r18_numba.Backend, kernel: IntegerKernel, problem: Problem
) -> None:
    for variant in range(2):
        case = make_case(kernel, problem, "edges", variant, variant=variant)
        got = run_kernel(backend, kernel, problem, *case.inputs, *case.weights)
        judged = judge(case, kernel.contract, got)
        assert judged.ok, f"{kernel.id}: {problem}: {judged}"


def test_every_quantised_op_has_a_kernel_here_and_there() -> None:
    for kernels in (all_kernels(), simulated_kernels()):
        found = {k.op for k in kernels if k.precision is INT8}
        assert found == set(QUANTIZED_OPS) - {QuantizedConvMaxPool, QuantizedAvgPoolLinear}


@pytest.mark.parametrize(
    ("tile", "outputs", "width"), [(LARGE, 100, 13), (WIDE, 65, 7), (SMALL, 33, 13)], ids=str
)
def test_the_tiles_of_a_gpu_multiply_exactly_with_ragged_edges(
    backend: r18_numba.Backend, tile: Tile, outputs: int, width: int
) -> None:
    conv = Conv2d(1, outputs, (3, 3), (1, 1), (1, 1), bias=True, residual=True)
    op, image = QuantizedConv2d(conv, ("uint8", "int8")), (1, 1, 10, width)
    kernel = QuantizedImplicitGemm(INT8, tile)
    assert not kernel.simulates
    equals_the_reference(backend, kernel, Problem(op, (image, (1, outputs, 10, width))))


@pytest.mark.parametrize("tile", LINEAR_TILES, ids=str)
def test_linear_is_exact_across_tiles(backend: r18_numba.Backend, tile: tuple[int, int]) -> None:
    problem = Problem(QuantizedLinear(Linear(37, 17)), ((3, 37),))
    equals_the_reference(backend, QuantizedLinearKernel(INT8, *tile), problem)


@pytest.mark.parametrize(("bits", "pixels"), [(8, False), (4, True), (2, False)])
def test_the_tiny_network_in_integers_equals_numpys_at_every_value(
    backend: r18_numba.Backend, bits: int, pixels: bool
) -> None:
    assert_equals_numpy(backend, tiny(), bits, batch=1, pixels=pixels)


@pytest.mark.parametrize("batch", [1, 64])
def test_a_gpu_is_given_tiles_of_whole_warps(batch: int) -> None:
    by_id = {kernel.id: kernel for kernel in all_kernels()}
    for problem in resnet18().problems(batch).values():
        if isinstance(problem.op, Conv2d):
            conv = QuantizedConv2d(replace(problem.op, bias=True), ("uint8",))
            chosen = filling(Problem(conv, problem.inputs), "int8", multiprocessors=132)
            kernel = by_id[chosen or ""]
            assert isinstance(kernel, QuantizedImplicitGemm)
            assert kernel.tile is not TINY


# -- what a GPU compiles -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def instructions() -> dict[str, list[list[str]]]:
    """By architecture, for each function: its name, whether the PTX has that target and local
    memory, and the instructions on floats."""
    if (made := numba_compiled.made("integers")) is None:
        pytest.skip("no libnvvm: pip install 'numba-cuda[cu13]' brings it")
    found: dict[str, list[list[str]]] = {}
    for target, *row in made:
        found.setdefault(target, []).append(row)
    return found


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_no_operation_of_a_requantisation_is_fused_on_a_gpu(
    target: str, instructions: dict[str, list[list[str]]]
) -> None:
    """Each operation is an instruction with its own rounding, for every storage format."""
    control, *rows = instructions[target]
    assert control[0] == "contracted"
    assert "fma.rn.f32" in control  # what the compiler makes of the same in Python
    found: dict[str, set[str]] = {}
    for name, targeted, local, *used in rows:
        assert (targeted, local) == ("True", "False"), name
        found.setdefault(name, set()).update(op for op in used if not op.startswith(MOVES))
    rounded = {"cvt.rni.f32.f32", "cvt.rzi.s32.f32", "max.f32", "min.f32"}
    product = {"cvt.rn.f32.s32", "mul.rn.f32"}
    residual = {"add.rn.f32", "cvt.rn.f32.s16", "cvt.rn.f32.u16"}
    assert found == {
        "implicit_qgemm": product | residual | rounded,
        "direct_qconv": product | residual | rounded,
        "tiled_qlinear": product,
        "qgap": product | rounded,
        "quantize": {"div.rn.f32"} | rounded,
        "qmaxpool": set(),
        "quantize_pixels": set(),
        "transpose": set(),
    }
    assert len([name for name, *_ in rows if name == "direct_qconv"]) >= 4


MOVES = ("mov.", "ld.", "st.", "selp.")
