"""Quantised networks against the integers that are specified: a kernel's fault names its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from faults.quantized import FAULTS
from r18.backend import CompileOptions, Program
from r18.backend.registry import get_backend
from r18.errors import UsageError
from r18.graph.passes import fuse
from r18.graph.quantization import Quantization
from r18.graph.quantize import quantization
from r18.graph.resnet import network, resnet, tiny
from r18.images.preprocess import Preprocess
from r18.weights import Weights, load_weights
from r18.weights.precisions import in_precision
from r18_oracle.conformance.programs import CHECKS, Subject
from r18_oracle.network.checkpoint_report import CheckpointReport, text
from r18_oracle.network.checkpoints import compare_checkpoints, seeded_images, seeded_pixels
from r18_oracle.network.integers import executed
from r18_oracle.search.coverage import program_refusal
from r18_oracle.search.network_run import NetworkRun
from spoiled_kernels import Altered, spoiled

BACKENDS = ("numpy", "numba-cpu", "torch")
SIMULATED = resnet("small", blocks=(1,), width=4, classes=3, image_size=16)
"""A network that the simulator computes in seconds."""


def compare(backend: Any, **options: Any) -> CheckpointReport:
    """The tiny network in integers, from two seeded images."""
    schedule = tiny()
    weights = options.pop("weights", None) or _weights()
    images = options.pop("images", None) or seeded_images(schedule, 2)
    return compare_checkpoints(backend, schedule, weights, images, precision="int8", **options)


@cache
def _weights() -> Weights:
    return load_weights("synthetic", tiny())


@pytest.mark.parametrize("name", BACKENDS)
def test_every_integer_and_every_logit_is_the_specified_one(name: str) -> None:
    report = compare(get_backend(name), taps="all")
    assert report.ok, text(report)
    assert {row.loss.max_abs for row in report.checkpoints} == {0.0}
    assert {row.loss.allowed_max for row in report.checkpoints} == {0.0}
    assert {step.ratio for step in report.steps} == {0.0}
    assert len(report.checkpoints) > 20
    assert report.multiple == 0
    assert report.top1 is not None
    assert (report.top1.bound, report.top1.ties, report.top1.wrong) == (0.0, (), ())


@pytest.mark.parametrize("name", BACKENDS)
def test_pixels_become_integers_by_the_table(name: str) -> None:
    normalize = Preprocess().normalize
    report = compare(
        get_backend(name), images=seeded_pixels(tiny(), 2, normalize), pixels=normalize
    )
    assert report.ok, text(report)
    first = "qconv2d_maxpool2d" if name == "numba-cpu" else "quantize_pixels"  # in one step
    assert report.steps[0].kernel.split("/")[1] == first


def test_the_simulator_computes_the_same_integers() -> None:
    weights = load_weights("synthetic", SIMULATED)
    images = seeded_images(SIMULATED, 1)
    report = compare_checkpoints(get_backend("numba"), SIMULATED, weights, images, precision="int8")
    assert report.ok, text(report)


def test_weights_keep_the_quantisation_that_they_hold() -> None:
    folded = fuse(tiny(), "all")
    images = seeded_images(tiny(), 2)
    scales = dict.fromkeys(("image", *(step.output for step in folded.steps)), 0.05)
    made: Quantization = quantization(folded, _weights(), scales, bits=4)
    own = replace(_weights(), quantization=made)
    options = CompileOptions(2, "int8")
    schedule, given = executed(tiny(), own, images.values, options)
    assert (schedule, given.keys()) == (
        in_precision(tiny(), own, options)[0],
        in_precision(tiny(), own, options)[1].keys(),
    )
    assert given["image.scale"] == np.float32(0.05)
    assert np.abs(given["layer1.0.conv1.int_weight"]).max() == 7
    assert compare(get_backend("numpy"), weights=own).ok


def test_some_values_of_the_quantisation_that_is_made_saturate() -> None:
    images = seeded_images(tiny(), 2)
    taps = ("stem_pool", "layer1", "layer2", "layer3", "layer4")
    options = CompileOptions(2, "int8", taps=taps)
    program = get_backend("numpy").compile(
        *executed(tiny(), _weights(), images.values, options), options
    )
    program(images.values)
    most = {name: float(np.mean(program.fetch(name) == 255)) for name in taps}
    assert sum(share > 0 for share in most.values()) >= 3, most
    assert max(most.values()) < 0.05, most


# -- planted faults ----------------------------------------------------------------------------


def _one_more(op: Any, inputs: Any, weights: Any, out: Any) -> None:
    """Change one element of the whole batch by one unit."""
    out[-1, 1, 2, 0] ^= 1


def test_a_unit_in_one_element_names_its_step_and_checkpoint() -> None:
    wrong = spoiled("numpy/qconv2d/im2col/int8", _one_more)
    report = compare(Altered(wrong), kernels={"layer2.0.conv2": wrong.id})
    found = report.divergence
    assert found is not None
    assert not report.ok
    assert (found.check, found.kernel) == ("checkpoint", "numpy/qconv2d/spoiled/int8")
    assert found.details["step"] == "layer2.0.conv2"
    assert found.coordinate == (1, 1, 2, 0)
    assert found.bound == 0.0
    bad = [row.name for row in report.checkpoints if not row.ok]
    assert bad[0] == "layer2", bad
    assert [step.step for step in report.steps if not step.ok] == ["layer2.0.conv2"]
    assert len(report.findings) == 1


def test_a_wrong_requantisation_is_named() -> None:
    (wrong,) = (f.kernel for f in FAULTS if f.kernel.id.endswith("qconv2d/ties_away/int8"))
    report = compare(Altered(wrong), kernels={"qconv2d": wrong.id}, weights=_on_ties())
    assert report.divergence is not None
    assert "every wrong element is as if ties are rounded away from zero" in (
        report.divergence.message
    )


def _on_ties() -> Weights:
    """Weights whose scales are powers of two, so that many sums are ties."""
    folded = fuse(tiny(), "all")
    scales = dict.fromkeys(("image", *(step.output for step in folded.steps)), 0.0625)
    made = quantization(folded, _weights(), scales, bits=2)
    even = {
        name: replace(weight, scale=np.exp2(np.rint(np.log2(weight.scale))))
        for name, weight in made.weights.items()
    }
    return replace(_weights(), quantization=quantization(folded, _weights(), scales, 2, even))


def test_the_last_bit_of_a_logit_is_seen() -> None:
    def next_number(op: Any, inputs: Any, weights: Any, out: Any) -> None:
        out[0, 3] = np.nextafter(out[0, 3], np.float32(np.inf))

    wrong = spoiled("numpy/qlinear/matmul/int8", next_number)
    report = compare(Altered(wrong), kernels={"qlinear": wrong.id})
    assert report.divergence is not None
    assert report.divergence.details["step"] == "fc"
    bad = [row.name for row in report.checkpoints if not row.ok]
    assert bad == ["logits", "output (no taps)"]


def test_a_fault_between_right_steps_is_one_of_the_checkpoint() -> None:
    class Late(Program):
        def fetch(self, name: str | None = None) -> Any:
            got = super().fetch(name)
            if name == "layer3":
                got[0, 0, 0, 0] += 1
            return got

    report = compare(Altered(program=Late))
    found = report.divergence
    assert found is not None
    assert found.details["checkpoint"] == "layer3"
    assert found.message.startswith(
        "checkpoint 'layer3' differs from the reference's integers, by up to 1: they are specified "
        "to the bit, and nothing may be lost; each of the "
    )


# -- what a backend can run --------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BACKENDS, "numba"])
def test_int8_is_run_where_there_are_kernels(name: str) -> None:
    assert program_refusal(get_backend(name), network("resnet18"), "int8", "all") is None


def test_int8_is_refused_where_sums_are_not_fused() -> None:
    why = (
        "int8 is computed at fusion level 'all', where a sum is requantised once; asked for 'none'"
    )
    assert program_refusal(get_backend("numpy"), tiny(), "int8", "none") == why
    with pytest.raises(UsageError, match="asked for 'none'"):
        compare(get_backend("numpy"), fusion="none")


def test_a_network_run_quantises_what_is_synthetic() -> None:
    run = NetworkRun("tiny", "synthetic:3", "int8", "all", 1, 5)
    report = run.on("numpy", lambda problem, kind, seed: None)
    assert isinstance(report, CheckpointReport)
    assert report.ok
    assert (report.precision, report.images) == ("int8", 1)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("name", BACKENDS)
def test_programs_of_integers_keep_what_programs_promise(
    name: str, check: Callable[[Subject], None]
) -> None:
    check(Subject(get_backend(name), "int8", "all"))
