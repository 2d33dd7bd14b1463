"""tools/measure_tiles.py: each tile of each kernel, with a stand-in for the clock."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from r18.graph.ops import Conv2d, Problem
from r18_cupy import Backend
from support import tool_module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tool_module("measure_tiles")


def test_a_kernel_of_one_tile_launches_that(tool: ModuleType) -> None:
    """Each one-tile kernel launches its own function; exactly one is the kernel's own choice."""
    problem = Problem(Conv2d(64, 64, (3, 3), (1, 1), (1, 1), bias=True), ((8, 64, 56, 56),))
    seen = 0
    backend = Backend()
    for kernel in tool.with_tiles(backend):
        if kernel.op is not Conv2d or kernel.refusal(problem) is not None:
            continue
        found = tool.candidates(backend, kernel, problem)
        functions = [tool.function_of(one, problem) for one in found]
        assert len(set(functions)) == len(functions) > 1
        assert functions.count(tool.function_of(kernel, problem)) == 1
        seen += 1
    assert seen >= 8


def test_what_is_measured_and_how_far_the_choice_is_from_the_best(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """A clock by which the chosen tile takes a quarter longer than every other tile."""

        def __init__(self, *about: object) -> None:
            self.problem: Any = about[1]

        def launches(self, kernel: Any) -> Any:
            return tool.function_of(kernel, self.problem)

        def measure(self, function: Any, count: int, repeat: int) -> float:
            return 10.0 if function == chosen else 8.0

    monkeypatch.setattr(tool, "Range", Clock)
    kernels = [
        kernel
        for kernel in tool.with_tiles(Backend())
        if kernel.id == "cupy/conv2d/implicit_gemm_wgmma_rows/tf32/nhwc"
    ]
    (problem,) = (
        found
        for found in tool.problems([8])
        if isinstance(found.op, Conv2d) and found.op.residual and found.op.in_channels == 64
    )
    chosen = tool.function_of(kernels[0], problem)
    found = list(tool.measured(Backend(), kernels, [problem]))
    assert [one.chosen for one in found].count(True) == 1
    text = tool.table(found).markdown()
    assert "1.250" in text
    assert "25.0% longer" in text
