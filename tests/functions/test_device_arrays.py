"""Functions over arrays on a GPU. Without one these tests are skipped, and say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checked_kernels
from r18.errors import BackendUnavailable
from r18_oracle.checked import Checked, How, check, target_of
from r18_oracle.functions.device_arrays import CuPyArrays, TorchCudaArrays

HERE = Path(checked_kernels.__file__)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")
HOW = How("brief", network=None, isolated=False)


def checked(name: str, like: str, **options: Any) -> Checked:
    place = name if ":" in name else f"{HERE}:{name}"
    return check(target_of(place, like, **options), HOW)


@GPU
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("like", ["matmul", "add"])
def test_pytorchs_own(like: str, dtype: str) -> None:
    result = checked(f"torch:{like}", like, dtype=dtype)
    assert result.target.arrays == "torch-cuda"
    assert result.ok, result.text()


@GPU
def test_a_matrix_product_in_tf32() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        result = checked("torch:matmul", "matmul")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert result.below == ("multiplies in tf32",), result.text()
    assert not result.findings, result.text()


@GPU
@pytest.mark.parametrize(
    ("name", "like", "caught"),
    [
        ("conv2d_zeros", "conv2d", "exact"),
        ("conv2d_unwritten", "conv2d", "full_write"),
        ("relu_in_place", "relu", "inputs_unchanged"),
    ],
)
def test_wrong_functions(name: str, like: str, caught: str) -> None:
    result = checked(name, like, arrays="torch-cuda")
    assert [finding.check for finding in result.findings] == [caught], result.text()


@GPU
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cupy(dtype: str) -> None:
    pytest.importorskip("cupy")
    result = checked("cupy:matmul", "matmul", dtype=dtype)
    assert result.target.arrays == "cupy"
    assert result.ok, result.text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("kind", [TorchCudaArrays, CuPyArrays])
def test_a_missing_device_is_named(kind: Any) -> None:
    with pytest.raises(BackendUnavailable) as raised:
        kind().device()
    assert raised.value.remedy
