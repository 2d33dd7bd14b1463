"""The cost of probing on a machine without NVIDIA's driver, and its message there."""

from __future__ import annotations

import sys

import pytest

import r18_cupy
from r18.errors import BackendUnavailable
from support import output_of


def test_without_a_driver_cupy_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r18_cupy, "find_spec", lambda name: object())
    monkeypatch.setattr(r18_cupy, "has_cuda_driver", lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it would raise another cause
    with pytest.raises(BackendUnavailable) as caught:
        r18_cupy.Backend().probe()
    assert caught.value.cause == "there is no CUDA driver for CuPy"
    assert caught.value.remedy == "Check the driver with nvidia-smi."


@pytest.mark.parametrize(("spec", "driver"), [(None, False), (None, True), (object(), True)])
def test_otherwise_importing_it_says_what_is_missing(
    spec: object, driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(r18_cupy, "find_spec", lambda name: spec)
    monkeypatch.setattr(r18_cupy, "has_cuda_driver", lambda: driver)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable) as caught:
        r18_cupy.Backend().probe()
    assert caught.value.cause.startswith("ModuleNotFoundError: ")
    assert caught.value.remedy == r18_cupy.INSTALL


def test_making_a_backend_lists_no_kernels() -> None:
    """Making a backend does not import the catalogue, which is slow and may not be needed."""
    code = """
import sys, r18_cupy
backend = r18_cupy.Backend()
print("r18_cupy.catalogue" in sys.modules, len(backend.kernels()) > 20)
"""
    assert output_of(code) == "False True"
