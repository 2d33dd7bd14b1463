"""The backend with every way to multiply: tiles are emulated on CPUs without AMX."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_tiles
import pytest

from r18.backend import Kernel
from r18_numba_cpu import Backend

NEEDS = {"_avx512_bf16": "AVX512-BF16", "_vnni": "VNNI", "_avx2": "AVX2"}
"""The instructions that a kernel needs and that are not emulated, by its algorithm's ending."""


@pytest.fixture(scope="module")
def backend_with_tiles() -> Iterator[Backend]:
    with emulated_tiles.used():
        found = Backend()
        found.probe()
        yield found


@pytest.fixture
def only_where_it_runs(request: pytest.FixtureRequest, backend_with_tiles: Backend) -> None:
    """Skip a test whose `kernel` needs an instruction that this CPU lacks."""
    if "kernel" not in getattr(getattr(request.node, "callspec", None), "params", {}):
        return
    kernel: Kernel = request.node.callspec.params["kernel"]
    for ending, name in NEEDS.items():
        if kernel.algorithm.endswith(ending) and kernel not in backend_with_tiles.kernels():
            pytest.skip(f"this CPU has no {name}")
