"""Verification: what agrees, differs or crashes, and that nothing executed is no success."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import r18_oracle.fixtures as fixtures_module
from r18.backend import Array, Backend, Kernel
from r18.cli.app import FOUND, REFUSED
from r18.errors import BackendUnavailable, ShapeError, UnknownName, UsageError
from r18.host import HostKernel
from r18.ops import Conv2d, Problem
from r18.schedule import network
from r18.weights import Weights, load_weights
from r18_numpy import Backend as NumpyBackend
from r18_oracle.images import seeded
from r18_oracle.verify import ATOL, text, verify

TINY = network("tiny")
LAYER3_CHANNELS = 32


class Altered(NumpyBackend):
    """NumPy's backend with something done to each convolution's output."""

    name = "altered"

    def after(self, op: Conv2d, out: Array) -> None: ...

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._altered(kernel) for kernel in super().kernels())

    def _altered(self, kernel: Kernel) -> Kernel:
        if not (isinstance(kernel, HostKernel) and kernel.op is Conv2d):
            return kernel

        def run(op: Conv2d, inputs: Any, weights: Any, out: Array, workspace: Array) -> None:
            kernel.run(op, inputs, weights, out, workspace)
            self.after(op, out)

        return replace(kernel, run=run)


class WrongLayer3(Altered):
    name = "wrong-layer3"

    def after(self, op: Conv2d, out: Array) -> None:
        if op.out_channels == LAYER3_CHANNELS:
            out *= 1.01


class NaNInLayer2(Altered):
    name = "nan-in-layer2"

    def after(self, op: Conv2d, out: Array) -> None:
        if op.out_channels == 16:
            out[-1, -1, -1, -1] = math.nan


class Impostor(WrongLayer3):
    """It gives itself the reference's name, and is compared all the same."""

    name = "numpy"


class Crashing(Altered):
    name = "crashing"

    def after(self, op: Conv2d, out: Array) -> None:
        raise MemoryError("device lost")


class OnlyFP64(NumpyBackend):
    name = "only-fp64"

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(k for k in super().kernels() if k.precision.name == "fp64")


class Refusing(NumpyBackend):
    """It has kernels in fp32, but none that takes a strided convolution."""

    name = "refusing"

    def kernels(self) -> tuple[Kernel, ...]:
        def refuses(problem: Problem) -> str | None:
            strided = isinstance(problem.op, Conv2d) and problem.op.stride > (1, 1)
            return "strides are not for me" if strided else None

        return tuple(replace(k, refuses=refuses) for k in super().kernels())  # type: ignore[type-var]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_weights("synthetic", TINY)


@pytest.fixture
def numpy_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixtures_module, "REFERENCES", ("numpy",))


def invoke(*args: object) -> Result:
    """Run `verify`; errors of `R18Error` stay in `result.exception`, as `main` gets them."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(importlib.import_module("r18.cli.verify").verify)
    return CliRunner().invoke(app, ["--network", "tiny", *map(str, args)])


def backend(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


# -- the library -------------------------------------------------------------------------------


def test_two_backends_agree_at_every_level(weights: Weights) -> None:
    torch: Backend = pytest.importorskip("r18_torch").cpu()
    told: list[str] = []
    found = verify(
        {"numpy": NumpyBackend(), "torch": torch},
        TINY,
        weights,
        seeded(TINY, 2),
        fusions=("none", "all"),
        progress=told.append,
    )
    assert found.ok
    assert found.reference == "torch"
    assert [(run.backend, run.precision, run.fusion) for run in found.runs] == [
        ("numpy", "fp32", "none"),
        ("numpy", "fp32", "all"),
        ("numpy", "fp64", "none"),
        ("numpy", "fp64", "all"),
        ("torch", "fp32", "none"),
        ("torch", "fp32", "all"),
        ("torch", "fp64", "all"),  # fp64 at level none is the reference itself
    ]
    assert found.comparisons == 7 * 7
    assert len(told) == 7
    assert found.closing() == "2 backends agree on 7 checkpoints: no difference"
    for run in found.runs:
        for row in run.rows:
            assert row.comparison.tolerance >= ATOL[run.precision]
            assert row.comparison.max_abs < (1e-12 if run.precision == "fp64" else 3e-5)


@pytest.mark.usefixtures("numpy_reference")
def test_a_wrong_kernel_is_named_where_it_begins(weights: Weights) -> None:
    found = verify({"numpy": NumpyBackend(), "mine": WrongLayer3()}, TINY, weights, seeded(TINY, 2))
    assert not found.ok
    assert [run.ok for run in found.runs] == [True, True, False, False]
    assert found.closing().startswith(
        "difference: mine in fp32, fusion 'all': first bad checkpoint: layer3 (max_abs "
    )
    assert found.closing().endswith(" (and 1 more)")
    shown = text(found)
    assert shown.endswith(found.closing())
    assert shown.count("BAD") == 2 * 4  # layer3, layer4, gap, logits
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["ok"] is False


@pytest.mark.usefixtures("numpy_reference")
def test_nan_is_a_difference(weights: Weights) -> None:
    found = verify({"mine": NaNInLayer2()}, TINY, weights, seeded(TINY), precisions=["fp32"])
    assert "first bad checkpoint: layer2 (" in found.closing()
    assert "not finite" in found.closing()
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.usefixtures("numpy_reference")
def test_a_crash_or_a_refusal_is_a_failed_run(weights: Weights) -> None:
    for kind, message in (
        (Crashing, "it raised MemoryError: device lost"),
        (Refusing, "strides are not for me"),
    ):
        found = verify({"mine": kind()}, TINY, weights, seeded(TINY), precisions=["fp32"])
        assert not found.ok
        assert found.comparisons == 0
        assert message in found.closing()
        assert message in text(found)


@pytest.mark.usefixtures("numpy_reference")
def test_missing_precisions_are_shown(weights: Weights) -> None:
    found = verify({"mine": OnlyFP64()}, TINY, weights, seeded(TINY))
    assert found.ok
    assert found.skipped == ("mine has no kernels in fp32",)
    assert "skipped: mine has no kernels in fp32" in text(found)


@pytest.mark.usefixtures("numpy_reference")
def test_nothing_compared_is_an_error(weights: Weights) -> None:
    images = seeded(TINY)
    for backends, options, message in (
        ({}, {}, "no program but the reference itself was asked for"),
        ({"a": OnlyFP64()}, {"precisions": ["fp32"]}, "a has no kernels in fp32"),
        (
            {"numpy": NumpyBackend()},
            {"precisions": ["fp64"], "fusions": ["none"]},
            "no program but the reference",
        ),
    ):
        with pytest.raises(UsageError, match="nothing was compared, so nothing is verified") as e:
            verify(backends, TINY, weights, images, **options)  # type: ignore[arg-type]
        assert message in str(e.value)
    with pytest.raises(UsageError, match="unknown precision to verify 'fp16'"):
        verify({"a": NumpyBackend()}, TINY, weights, images, precisions=["fp16"])
    with pytest.raises(UsageError, match="unknown fusion level 'most'"):
        verify({"a": NumpyBackend()}, TINY, weights, images, fusions=["most"])
    with pytest.raises(ShapeError):
        verify({"a": NumpyBackend()}, TINY, weights, seeded(network("tiny", image_size=64)))


@pytest.mark.usefixtures("numpy_reference")
def test_the_name_alone_does_not_make_a_backend_the_reference(weights: Weights) -> None:
    options: dict[str, Any] = {"precisions": ["fp64"], "fusions": ["none"]}
    found = verify({"mine": Impostor()}, TINY, weights, seeded(TINY), **options)
    assert not found.ok


@pytest.mark.usefixtures("numpy_reference")
def test_one_backend_alone_is_said_to_be_alone(weights: Weights) -> None:
    found = verify({"numpy": NumpyBackend()}, TINY, weights, seeded(TINY))
    assert found.ok
    assert found.closing() == (
        "numpy agrees with itself on 7 checkpoints; no second backend was compared"
    )


# -- command line ------------------------------------------------------------------------------


def test_verify_command_with_every_backend() -> None:
    pytest.importorskip("torch")
    result = invoke()
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["backend", "device"]
    assert any(line.split()[:2] == ["numpy", "CPU"] for line in lines)
    assert "tiny, weights synthetic:0, batch 2, seed 0" in lines
    assert "atol 1e-4 in fp32, 1e-9 in fp64, times max(1, max |expected|)" in lines
    assert lines[-1].endswith(" backends agree on 7 checkpoints: no difference")


@pytest.mark.usefixtures("numpy_reference")
def test_verify_command_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = invoke("--backend", "numpy", "--batch", 1)
    assert alone.exit_code == 0, alone.exception
    wrong = invoke("--backend", f"numpy,{backend(WrongLayer3)}", "--precision", "fp32")
    assert wrong.exit_code == FOUND
    assert "first bad checkpoint: layer3" in wrong.stdout.splitlines()[-1]
    as_json = invoke("--backend", backend(WrongLayer3), "--json")
    assert as_json.exit_code == FOUND
    assert json.loads(as_json.stdout)["backends"][0]["name"] == backend(WrongLayer3)
    crashed = invoke("--backend", backend(Crashing))
    assert crashed.exit_code == REFUSED
    assert "it raised MemoryError: device lost" in crashed.stdout
    nothing = invoke("--backend", backend(OnlyFP64), "--precision", "fp32")
    assert isinstance(nothing.exception, UsageError)
    unknown = invoke("--backend", "numpy,nompy")
    assert isinstance(unknown.exception, UnknownName)
    monkeypatch.setenv("R18_BACKEND", "no_such_module:Backend")
    assert isinstance(invoke().exception, BackendUnavailable)
    monkeypatch.setenv("R18_BACKEND", backend(WrongLayer3))
    assert invoke("--precision", "fp64").exit_code == FOUND
