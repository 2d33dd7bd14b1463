"""`r18 kernels`: its output for kernels with and without functions of their own."""

from __future__ import annotations

import json
from typing import cast

import pytest

from commands import r18
from r18.backend import RoundingContract
from r18.backend.registry import load_backend
from r18.cli.app import REFUSED
from r18.cli.kernels import compile_kernels, contract_words
from r18.errors import UsageError
from r18_cupy.cuda.compiler import ARCHITECTURES, CompileError, architecture, capability
from r18_cupy.kernel import CudaKernel

DIRECT = "cupy/conv2d/direct/f*"


def test_kernels_without_functions() -> None:
    done = r18("kernels", "--backend", "numpy")
    assert done.code == 0
    lines = done.out.splitlines()
    ids = [kernel.id for kernel in load_backend("numpy").kernels()]
    assert [line.split()[0] for line in lines[2 : 2 + len(ids)]] == ids
    assert "registers" not in done.out
    assert lines[-1] == f"{len(ids)} kernels, 0 compiled functions"
    refused = r18("kernels", "--backend", "numpy", "--arch", "sm_90")
    assert refused.code == REFUSED
    assert "'numpy' has none of those" in refused.err


def test_a_line_for_each_function_and_architecture() -> None:
    """Each function has a line for each architecture, compiled here without a GPU."""
    done = r18("kernels", "--backend", "cupy", "--kernels", DIRECT, "--arch", "sm_80,sm_90")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines() if "conv2d_direct " in line]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        (f"cupy/conv2d/direct/{precision}", f"STORAGE={storage}", target)
        for precision, storage in (("fp32", "float"), ("fp16", "__half"))
        for target in ("sm_80", "sm_90")
    ]
    assert all(int(row[4]) > 0 and row[5:] == ["0", "0", "0"] for row in rows)
    assert done.out.splitlines()[-1] == "2 kernels, 4 compiled functions; none spills"


def test_json_has_contracts_digests_and_resources() -> None:
    done = r18("kernels", "--backend", "cupy", "--kernels", DIRECT, "--arch", "sm_90", "--json")
    first, _ = json.loads(done.out)
    kernel = next(k for k in load_backend("cupy").kernels() if k.id == first["kernel"])
    assert kernel.targets
    assert first["digest"] == kernel.digest
    assert first["contract"]["accumulate"] == "float32"
    assert first["deterministic"] is True
    (function,) = first["functions"]
    assert function["target"] == "sm_90"
    assert function["registers"] == next(iter(kernel.resources("sm_90").values())).registers


def test_nothing_is_compiled_when_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r18_cupy.kernel.compile_entry", lambda *_: pytest.fail("compiled"))
    done = r18("kernels", "--backend", "cupy", "--kernels", DIRECT, "--arch", "none")
    assert done.out.splitlines()[-1] == "2 kernels, 0 compiled functions"


def test_wrong_requests() -> None:
    unknown = r18("kernels", "--backend", "cupy", "--kernels", "cupy/conv2d/dirct/fp32")
    assert unknown.code == REFUSED
    assert "did you mean 'cupy/conv2d/direct/fp32'" in unknown.err
    target = r18("kernels", "--backend", "cupy", "--kernels", DIRECT, "--arch", "ampere")
    assert target.code == REFUSED
    assert "an architecture is named like sm_90 or sm_90a, got 'ampere'" in target.err


def test_a_source_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(entry: object, target: str) -> None:
        raise CompileError("conv2d_direct.cu does not compile")

    monkeypatch.setattr("r18_cupy.kernel.compile_entry", broken)
    kernels = [k for k in load_backend("cupy").kernels() if k.algorithm == "direct"]
    with pytest.raises(CompileError, match="does not compile"):
        compile_kernels(kernels, ["sm_90"])


def test_every_kernel_says_what_it_is_meant_for() -> None:
    for kernel in load_backend("cupy").kernels():
        assert kernel.targets
        assert kernel.targets
        assert len(kernel.digest) == 64
        assert all(path.exists() for path in kernel.source_files)
        assert set(kernel.targets) & {*ARCHITECTURES, "sm_90a", "sm_100a"}


def test_architectures_and_their_capabilities() -> None:
    found = [capability(name) for name in ("sm_75", "sm_90", "sm_90a", "sm_120")]
    assert found == [(7, 5), (9, 0), (9, 0), (12, 0)]
    kernels = cast("tuple[CudaKernel, ...]", load_backend("cupy").kernels())
    targets = {architecture(e, (9, 0)) for k in kernels for e in k.entries() if not k.family}
    assert targets == {"sm_90"}
    hopper = [kernel for kernel in kernels if kernel.family == "sm_90a"]
    assert hopper
    for kernel in hopper:
        assert {architecture(entry, (9, 0)) for entry in kernel.entries()} == {"sm_90a"}
        assert kernel.targets == ("sm_90a",)
        assert not any(kernel.runs_on(capability(name)) for name in ("sm_80", "sm_100"))
    with pytest.raises(UsageError):
        capability("90")


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        (RoundingContract("sum", "float32", "float32"), "sum float32"),
        (
            RoundingContract("sum", "float32", "float16", truncates=True, blocks=4),
            "sum float32 → float16, truncates, 4 blocks",
        ),
        (
            RoundingContract("sum", "float32", "bfloat16", stored_sum=True),
            "sum float32 → bfloat16, stored sum",
        ),
    ],
)
def test_contracts_in_words(contract: RoundingContract, expected: str) -> None:
    assert contract_words(contract) == expected
