"""The suites' own checks on the wrong kernels that `test_generated.py` has caught.

Their checks are rewritten here as the suites have them: KernelBench compares five random trials of
one fixed shape (`src/kernelbench/eval.py`), BackendBench each of a list of inputs
(`BackendBench/eval.py`, whose `allclose` does not pass on the tolerances that it is given).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_generated import CAUGHT

from r18_oracle.functions.suites.backendbench import SUFFIX, overload_of

HERE = Path(__file__).parent
TRIALS = 5
FIRST, NOW = 1e-2, 1e-4
"""KernelBench's tolerance for float32: the first one, and that of its newest version."""


def module_of(file: Path) -> ModuleType:
    """A newly loaded module, without cached results."""
    spec = importlib.util.spec_from_file_location(f"judged_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernelbench_passes(file: Path, tolerance: float) -> bool:
    """KernelBench's `run_and_check_correctness`: five seeds, one shape, same-seeded models."""
    module = module_of(file)
    torch.manual_seed(42)
    seeds = [int(torch.randint(0, 2**32 - 1, (1,))) for _ in range(TRIALS)]
    made = []
    for name in ("Model", "ModelNew"):
        torch.manual_seed(42)
        made.append(getattr(module, name)(*module.get_init_inputs()))
    for seed in seeds:
        torch.manual_seed(seed)
        inputs = module.get_inputs()
        with torch.no_grad():
            expected, got = (one(*inputs) for one in made)
        if expected.shape != got.shape:
            return False
        if not torch.allclose(expected, got, atol=tolerance, rtol=tolerance):
            return False
    return True


def backendbench_passes(folder: Path, inputs: list[tuple[Any, ...]]) -> bool:
    """BackendBench's `eval_correctness`: every input, `assert_close` with 1e-2 in any format."""
    (inner,) = folder.iterdir()
    module = module_of(inner / f"{inner.name}_implementation_v1.py")
    kernel = getattr(module, f"{inner.name}{SUFFIX}")
    name, _, overload = overload_of(inner.name).partition(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    for arguments in inputs:
        try:
            torch.testing.assert_close(
                operator(*arguments), kernel(*arguments), equal_nan=True, atol=1e-2, rtol=1e-2
            )
        except AssertionError:
            return False
    return True


KERNELBENCH_SAYS = {
    "zeros": (True, True),
    "identity": (True, True),
    "stale": (True, False),
    "cached": (True, True),
    "one_shape": (True, True),
    "boundary_row": (True, True),
    "last_row": (True, True),
    "lower_precision": (True, False),
}
"""Whether each wrong kernel passes with the first tolerance, and with the newest."""


@pytest.mark.parametrize("name", KERNELBENCH_SAYS)
def test_what_kernelbench_says(name: str) -> None:
    file = HERE / "kernelbench" / f"{name}.py"
    found = kernelbench_passes(file, FIRST), kernelbench_passes(file, NOW)
    assert found == KERNELBENCH_SAYS[name]


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _products() -> list[tuple[Any, ...]]:
    return [
        (a, b) for a, b in zip(drawn((64, 64), (96, 64)), drawn((64, 64), (64, 8)), strict=True)
    ]


def _convolutions() -> list[tuple[Any, ...]]:
    (w,) = drawn((8, 4, 3, 3))
    how = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return [(x, w, *how) for x in drawn((2, 4, 16, 16), (1, 4, 32, 32), (1, 4, 56, 56))]


BACKENDBENCH_SAYS: dict[str, tuple[Callable[[], list[tuple[Any, ...]]], bool]] = {
    "zeros": (lambda: [(x, 1, False) for x in drawn((4, 32768), (2, 50000))], True),
    "stale": (
        lambda: [(x, [-1, -2], True) for x in drawn((1, 4, 512, 512), (1, 4, 512, 512))],
        True,
    ),
    "cached": (_products, True),
    "one_shape": (lambda: [(x,) for x in drawn((64, 64), (128, 128), (32,))], True),
    "lower_precision": (_products, True),
    "boundary_row": (_convolutions, True),
}
"""By fault: inputs like those in a trace of a network, and whether the kernel passes.

Sizes are powers of two and multiples of eight, as in such a trace.
"""


@pytest.mark.parametrize("name", BACKENDBENCH_SAYS)
def test_what_backendbench_says(name: str) -> None:
    inputs, passes = BACKENDBENCH_SAYS[name]
    assert backendbench_passes(HERE / "backendbench" / name, inputs()) == passes


def test_right_kernels_pass_there_too() -> None:
    """Right kernels pass too, so the suites' checks do not fail everything."""
    for file in sorted((HERE / "kernelbench").glob("right_*.py")):
        assert file.stem == "right_batch_norm" or kernelbench_passes(file, NOW), file.stem


def test_every_caught_kernel_is_asked_about() -> None:
    judged = {f"kernelbench/{name}.py" for name in KERNELBENCH_SAYS}
    judged |= {f"backendbench/{name}" for name in BACKENDBENCH_SAYS}
    lower = {"kernelbench/lower_precision.py", "backendbench/lower_precision"}
    assert judged == {name for name in CAUGHT if not name.startswith("flashinfer")} | lower
