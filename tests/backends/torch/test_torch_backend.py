"""The PyTorch backend against torchvision's own module, hooked everywhere; and its precisions."""

from __future__ import annotations

import copy
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import r18_torch
from r18.backend import CompileOptions, DeviceInfo, Program
from r18.errors import BackendUnavailable, NoKernel, UsageError
from r18.graph.ops import BatchNorm, Conv2d, GlobalAvgPool, MaxPool2d, Op, Problem, ReLU, Softmax
from r18.graph.passes import FUSION_LEVELS, fuse
from r18.graph.resnet import resnet18
from r18.graph.schedule import Schedule
from r18.runtime.launch import run_kernel
from r18.runtime.plan import choose_kernel
from support import ROOT, Array

SIZE, BATCH = 64, 2
SCHEDULE = resnet18(image_size=SIZE)
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

# What may differ from torchvision by the order of a sum: `addmm` adds the bias of the classifier
# inside, and adaptive pooling is not `mean`. All else is the same call on the same numbers.
SUMMED_OTHERWISE = ("avgpool", "fc", "")
ULPS = 4


@cache
def network() -> nn.Module:
    """torchvision's ResNet-18, seeded: random weights, BatchNorms measured and then perturbed."""
    torch.manual_seed(18)
    model = torchvision.models.resnet18()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0  # one training pass sets the statistics
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.2)
        model.train()(torch.randn(4, 3, SIZE, SIZE))
        for norm in norms:
            norm.running_mean += 0.1 * torch.randn_like(norm.running_mean)
            norm.running_var *= torch.empty_like(norm.running_var).uniform_(0.8, 1.25)
    return model.eval()


@cache
def weights() -> dict[str, Array]:
    state = network().state_dict()
    return {name: state[name].numpy() for name in SCHEDULE.weight_specs}


def pixels() -> Array:
    return np.random.default_rng(0).normal(size=(BATCH, 3, SIZE, SIZE)).astype(np.float32)


@cache
def hooked(precision: str) -> dict[str, list[Array]]:
    """The outputs of every module of torchvision's network, in the order of its calls."""
    model = copy.deepcopy(network()).to(DTYPES[precision])
    outputs: dict[str, list[Array]] = {}

    def keep(path: str) -> Any:
        # A copy: the ReLU behind a BatchNorm works in place.
        return lambda module, args, output: outputs.setdefault(path, []).append(
            output.clone().numpy()
        )

    for path, module in model.named_modules():
        module.register_forward_hook(keep(path))
    with torch.no_grad():
        model(torch.from_numpy(pixels()).to(DTYPES[precision]))
    assert outputs.keys() == {path for path, _ in model.named_modules()}
    return outputs


def compiled(schedule: Schedule = SCHEDULE, **options: Any) -> Program:
    given = CompileOptions(batch=BATCH, **{"fusion": "none", **options})
    return r18_torch.cpu().compile(schedule, weights(), given)


def values_of(path: str, calls: int) -> list[str]:
    """The values of a module's calls: a block's ReLU runs twice, the second is `relu_1`."""
    if path == "":
        return [SCHEDULE.output]
    if calls == 2:
        return [SCHEDULE.value_of(path), SCHEDULE.value_of(f"{path}_1")]
    return [SCHEDULE.value_of(path)]


@pytest.mark.parametrize("precision", DTYPES)
def test_every_module_of_torchvision_has_our_values(precision: str) -> None:
    """Values are torchvision's to the bit, and to 4 ulp of the largest for `SUMMED_OTHERWISE`."""
    program = compiled(precision=precision, taps=tuple(SCHEDULE.taps))
    program(pixels())
    compared = set()
    for path, outputs in hooked(precision).items():
        values = values_of(path, len(outputs))
        for value, theirs in zip(values, outputs, strict=True):
            ours = program.fetch(value)
            assert ours.dtype == theirs.dtype
            theirs = theirs.reshape(ours.shape)  # (N, C, 1, 1) behind the average
            assert np.abs(theirs).max() > 0
            if path in SUMMED_OTHERWISE:
                ulp = np.spacing(np.abs(theirs).max())
                assert np.abs(ours - theirs).max() <= ULPS * ulp, path
            else:
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{path} ({value})")
            compared.add(value)
    # No module makes the residual sums; the ReLU behind each of them does compare them.
    made = {s.output for s in SCHEDULE.steps}
    assert {value for value in made if not value.endswith(".add")} == compared


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("level", FUSION_LEVELS[1:])
def test_fused_levels_are_near_torchvision(precision: str, level: str) -> None:
    """Fused levels stay near torchvision at each checkpoint left: folding rounds weights again."""
    taps = tuple(c.name for c in fuse(SCHEDULE, level).checkpoints)
    program = compiled(precision=precision, fusion=level, taps=taps)
    program(pixels())
    tolerance = {"fp32": 1e-5, "fp64": 1e-13}[precision]
    paths = [tap for tap in taps if tap in hooked(precision)]
    assert {"layer1", "layer2.0.downsample", "layer4.1"} <= set(paths)
    for path in paths:
        theirs = hooked(precision)[path][-1]
        assert np.abs(program.fetch(path) - theirs).max() <= tolerance * np.abs(theirs).max()
    np.testing.assert_allclose(
        program.fetch(),
        hooked(precision)[""][0],
        rtol=0,
        atol=tolerance * np.abs(hooked(precision)[""][0]).max(),
    )


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize(("precision", "unit"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_narrow_precisions_run_and_are_near(precision: str, unit: float, level: str) -> None:
    """Narrow precisions are off by a few units: some 20 layers each round to storage.

    This is no bound, which the oracle derives; it distinguishes a narrow format from a broken one.
    """
    exact = hooked("fp64")[""][0]
    logits = compiled(precision=precision, fusion=level)(pixels())
    assert logits.dtype == np.float32
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert unit / 8 < error < 16 * unit
    stored = logits.astype({"fp16": np.float16}.get(precision, np.float32))
    np.testing.assert_array_equal(stored.astype(np.float32), logits)  # widened exactly


def test_bf16_logits_are_bfloat16_numbers() -> None:
    logits = np.ascontiguousarray(compiled(precision="bf16")(pixels()))
    assert not (logits.view(np.uint32) & 0xFFFF).any()


def test_tf32_on_the_cpu_is_refused_with_the_reason() -> None:
    with pytest.raises(NoKernel) as caught:
        compiled(precision="tf32")
    head, *reasons = str(caught.value).splitlines()
    assert head.endswith("in tf32 (step 'conv1' of 'resnet18' on backend 'torch')")
    assert reasons == [
        f"  torch/conv2d/{algorithm}/tf32: tf32 is a format of CUDA's tensor cores; this is a CPU"
        for algorithm in ("aten", "aten_nhwc")
    ]


def test_the_layout_of_a_convolution_does_not_matter() -> None:
    """Convolutions in channels-last, with their relayouts, give the same network."""
    program = compiled(kernels={"conv2d": "torch/conv2d/aten_nhwc/fp32"}, taps=("layer1",))
    program(pixels())
    for path, got in (("layer1", program.fetch("layer1")), ("", program.fetch())):
        theirs = hooked("fp32")[path][-1]
        np.testing.assert_allclose(got, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


# -- kernels -----------------------------------------------------------------------------------


def run(op: Op, *arrays: Array, precision: str = "fp64") -> Array:
    backend = r18_torch.cpu()
    problem = Problem(op, tuple(a.shape for a in arrays[: op.arity]))
    kernel = choose_kernel(backend.kernels(), problem, precision)
    return run_kernel(backend, kernel, problem, *arrays)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_the_semantics_of_what_is_not_finite(precision: str) -> None:
    """NaN and infinities behave as `r18.backend` says; `test_numpy_backend` tests NumPy's."""
    nan, inf = np.nan, np.inf

    def equal(got: Array, expected: Any) -> None:
        np.testing.assert_array_equal(got.astype(np.float64), expected)

    def kernel(op: Op, *arrays: Any) -> Array:
        return run(op, *(np.array(a, np.float64) for a in arrays), precision=precision)

    equal(kernel(ReLU(), [[nan, inf, -inf, -1, 2]]), [[nan, inf, 0, 0, 2]])
    pool = MaxPool2d((3, 3), (2, 2), (1, 1))
    equal(kernel(pool, np.full((1, 1, 5, 5), -inf)), np.full((1, 1, 3, 3), -inf))
    x = np.zeros((1, 1, 8, 8))
    x[0, 0, 3, 4], x[0, 0, 3, 5] = nan, inf
    expected = np.zeros((4, 4))
    expected[1:3, 2], expected[1:3, 3] = nan, inf
    equal(kernel(pool, x)[0, 0], expected)
    rows = [[1, nan, 2], [1, inf, 2], [1, -inf, 1], [-inf] * 3]
    equal(kernel(Softmax(), rows), [[nan] * 3, [nan] * 3, [0.5, 0, 0.5], [nan] * 3])
    fused = Conv2d(1, 3, (1, 1), residual=True, relu=True)
    residual = np.reshape([nan, -inf, inf], (1, 3, 1, 1))
    got = kernel(fused, np.ones((1, 1, 1, 1)), residual, np.ones((3, 1, 1, 1)))
    equal(got.ravel(), [nan, 0, inf])


def test_eps_is_inside_the_root() -> None:
    one, zero = np.ones(1), np.zeros(1)
    got = run(BatchNorm(1, eps=0.25), np.full((1, 1, 1, 1), 3.0), one, zero, one, zero)
    assert got.item() == 4  # (3 − 1) / √0.25


def test_the_average_of_float16_is_summed_in_float32() -> None:
    """Averages of float16 are summed in float32: 4096 elements near 32 exceed float16's range."""
    x = np.full((1, 1, 64, 64), 32.0)
    assert run(GlobalAvgPool(), x, precision="fp16").item() == 32


# -- device ------------------------------------------------------------------------------------


def test_the_device_is_chosen_explicitly_or_found() -> None:
    info = r18_torch.cpu().probe()
    assert isinstance(info, DeviceInfo)
    assert info.kind == "cpu"
    assert f"PyTorch {torch.__version__}" in info.name
    assert r18_torch.Backend().probe().kind == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UsageError, match="device must be auto, cpu or cuda, got 'gpu'"):
        r18_torch.Backend("gpu")


def test_cuda_without_a_device_is_unavailable_and_does_not_become_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable) as caught:
        r18_torch.cuda().probe()
    assert caught.value.cause == f"PyTorch {torch.__version__} sees no CUDA device"
    assert "r18_torch:cpu" in caught.value.remedy


def test_the_faults_declared_of_cudnn_are_of_kernels_that_there_are() -> None:
    """Each declared fault of cuDNN names an existing kernel, a reason and a link."""
    text = (ROOT / "docs" / "backends" / "torch-cuda-xfails.toml").read_text("utf-8")
    entries = tomllib.loads(text)["xfail"]
    ids = [kernel.id for kernel in r18_torch.Backend("cuda").kernels()]
    for entry in entries:
        assert entry["reason"]
        assert entry["link"].startswith("https://")
        glob = entry["test"].removeprefix("test_kernel[").removesuffix("]")
        assert [name for name in ids if fnmatchcase(name, glob)], entry["test"]
    assert len({entry["test"] for entry in entries}) == len(entries)
