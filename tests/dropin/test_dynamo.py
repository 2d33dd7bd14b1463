"""`torch.compile(model, backend="r18")`: our layers run on our kernels, as accurately."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import logging
import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torchvision
from test_family import check_like, pixels, seeded, undrawn
from test_family import small as small_resnet
from torch import nn
from torch._dynamo.backends import registry
from torch.nn import functional as F

from r18.backend.registry import get_backend, installed
from r18.errors import BackendUnavailable, UnknownName, UsageError
from r18.evaluate.margins import multiple
from r18.graph.precision import FP32
from r18.graph.resnet import FAMILY
from r18.torch import dynamo, explain, optimize_resnet
from r18.torch.dynamo import compile_graph
from r18.torch.followed import ORPHANS, Followed, Prepared, followed
from support import ROOT

BACKENDS = ["numpy", *(name for name in ("numba-cpu",) if name in installed())]
FAST = BACKENDS[-1]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start with nothing compiled or logged, and without R18_BACKEND."""
    torch._dynamo.reset()
    monkeypatch.setattr(dynamo, "_SAID", set())
    monkeypatch.delenv("R18_BACKEND", raising=False)
    yield
    torch._dynamo.reset()


class UNet(nn.Module):
    """A small UNet, with layers that our kernels compute and layers that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.deep = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding="same"), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, groups=2), nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 2, 1)
        self.head = nn.Linear(16, 3, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = self.down(x)
        deep = self.deep(self.pool(wide))
        deep = torch.relu(self.norm(self.conv(deep)) + deep)
        seen = self.head(F.adaptive_avg_pool2d(deep, 1).flatten(1))
        return self.out(torch.cat([self.up(deep), wide], 1)), seen


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(x))


def alive(model: nn.Module) -> Any:
    """The model in evaluation mode, with statistics and shifts unlike a new BatchNorm's."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(
                    0.5 + drawn.abs() if "var" in name else drawn / max(1, tensor[0].numel()) ** 0.5
                )
    return model.eval()


def small(size: int = 16, batch: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(5))


def ours(model: Any, backend: str = FAST, rest: str = "eager", **options: Any) -> Any:
    chosen = {"backend": backend, "rest": rest, **options}
    return torch.compile(model, backend=compile_graph, options=chosen)


def check_close(model: Any, x: torch.Tensor, found: Any) -> None:
    """Check the result as the drop-in's logits: its loss is at most a multiple of PyTorch's."""
    with torch.no_grad():
        own, exact = model(x), copy.deepcopy(model).double()(x.double())
    own, exact, found = ((t,) if isinstance(t, torch.Tensor) else t for t in (own, exact, found))
    used = {k.contract.algorithm for name in BACKENDS for k in get_backend(name).kernels()}
    for mine, theirs, right in zip(found, own, exact, strict=True):
        assert mine.stride() == theirs.stride()
        floor = right.pow(2).mean().sqrt() * torch.finfo(theirs.dtype).eps / 2
        loss = max((theirs - right).pow(2).mean().sqrt(), floor)
        assert (mine - right).pow(2).mean().sqrt() <= multiple(used, FP32) * loss


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[dynamo.Report, Any]]:
    """Compiles and calls a model without gradients; returns the logged report and the result."""
    caplog.set_level(logging.INFO, dynamo.__name__)

    def run(model: Any, x: torch.Tensor, backend: str = FAST) -> tuple[dynamo.Report, Any]:
        caplog.clear()
        with torch.inference_mode():
            found = ours(model, backend)(x)
        (record,) = (r for r in caplog.records if r.name == dynamo.__name__)
        assert isinstance(record.args, tuple)
        report = record.args[0]
        assert isinstance(report, dynamo.Report)
        return report, found

    return run


Run = Callable[..., tuple[dynamo.Report, Any]]


# -- the door ----------------------------------------------------------------------------------


def test_the_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (name,) = points = project["entry-points"]["torch_dynamo_backends"]
    assert name == "r18"
    registry.list_backends()
    point = EntryPoint(name, points[name], "torch_dynamo_backends")
    monkeypatch.setitem(registry._BACKENDS, name, point)
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    assert registry.lookup_backend("r18") is compile_graph
    model, x = alive(nn.Sequential(nn.Conv2d(3, 4, 3))), small()
    with torch.no_grad():
        check_close(model, x, torch.compile(model, backend="r18", options={"backend": FAST})(x))


# -- whole ResNets -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvisions_resnet_is_one_program(name: str, run: Run) -> None:
    with undrawn():
        model = seeded(torchvision.models.get_model(name, num_classes=7), FAMILY[name])
    images = pixels((32, 40))
    report, found = run(model, images)
    (line,) = report.ours
    assert f"{name} of 2×3×32×40" in line
    assert not report.rest
    assert report.backend == FAST
    check_like(model, images, found, FAST)


@pytest.mark.parametrize(
    "options",
    [
        {"block": torchvision.models.resnet.BasicBlock, "layers": (1, 1, 2, 1)},
        {
            "block": torchvision.models.resnet.Bottleneck,
            "layers": (1, 1, 1, 2),
            "groups": 4,
            "width_per_group": 24,
            "replace_stride_with_dilation": [False, True, True],
        },
    ],
)
def test_other_resnets_are_recognized(options: dict[str, Any], run: Run) -> None:
    model = alive(torchvision.models.ResNet(num_classes=7, **options))
    images = pixels((33, 33), 1)
    report, found = run(model, images, "numpy")
    assert len(report.ours) == 1
    assert "{" in report.ours[0]  # it has no name, and its parameters are said
    assert not report.rest
    check_like(model, images, found, "numpy")


class Timm(nn.Module):
    """A ResNet-18 as timm computes it: sums in place, the shortcut first, pooling by a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torchvision.models.resnet18(num_classes=5)

    def block(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if block.downsample is None else block.downsample(x)
        x = F.relu(block.bn1(block.conv1(x)), inplace=True)
        x = block.bn2(block.conv2(x))
        x += shortcut
        return block.relu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m: Any = self.inner
        x = m.maxpool(m.relu(m.bn1(m.conv1(x))))
        for stage in (m.layer1, m.layer2, m.layer3, m.layer4):
            for block in stage:
                x = self.block(block, x)
        return m.fc(x.mean((2, 3))).softmax(-1)


def test_a_resnet_is_recognized_by_what_it_computes(run: Run) -> None:
    model, images = alive(Timm()), pixels((32, 32))
    report, found = run(model, images)
    assert [line.split(": ")[1].split()[0] for line in report.ours] == ["resnet18"]
    assert report.rest == {"softmax": 1}
    check_close(model, images, found)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_timms_own(name: str, run: Run) -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    import timm

    model, images = alive(timm.create_model(name, num_classes=5)), pixels((32, 32))
    report, found = run(model, images)
    assert name in report.ours[0]
    check_close(model, images, found)


def test_almost_a_resnet_is_computed_layer_by_layer(run: Run) -> None:
    """A ResNet with a value that is read elsewhere is compiled by layers, and keeps the value."""

    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_resnet()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            m: Any = self.inner
            x = m.layer1(m.maxpool(m.relu(m.bn1(m.conv1(x)))))
            y = m.layer4(m.layer3(m.layer2(x)))
            return m.fc(torch.flatten(m.avgpool(y), 1)), x

    model, images = Tapped(), pixels((33, 33))
    report, found = run(model, images)
    assert len(report.ours) == 1 + 1 + 5 * 3 + 4 + 2  # stem, pool, blocks, shortcuts, head
    assert report.rest == {"flatten": 1}
    check_close(model, images, found)


# -- single layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_a_unet_has_its_layers_on_our_kernels(
    backend: str, format: torch.memory_format, run: Run
) -> None:
    model = alive(UNet()).to(memory_format=format)
    x = small().contiguous(memory_format=format)
    report, found = run(model, x, backend)
    labels = sorted(line.split(": ")[1].split("(")[0] for line in report.ours)
    fused = ["conv2d+bias", "conv2d+bias+relu", "conv2d+bias+relu", "conv2d+bias+residual+relu"]
    assert labels == [*fused, "gap", "linear", "maxpool2d"]
    assert report.rest == {"cat": 1, "conv_transpose2d": 1, "flatten": 1}
    check_close(model, x, found)


@pytest.fixture
def inductor() -> Iterator[None]:
    """Have inductor compile in this process, since starting others takes longer."""
    if (why := dynamo._no_inductor([torch.zeros(1)])) is not None:
        pytest.skip(f"inductor has no compiler here: {why}")
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.usefixtures("inductor")
def test_the_rest_is_inductors() -> None:
    """inductor compiles all other layers, and its code reads the current weights."""
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU()
    model, x = alive(nn.Sequential(*layers)), small(8, 1)
    with torch.no_grad():
        compiled = ours(model, rest="inductor")
        check_close(model, x, compiled(x))
        for change in (_doubled, _statistics):
            before = compiled(x)
            change(model)
            check_close(model, x, compiled(x))
            assert not torch.equal(compiled(x), before)
    assert "r18::layer" in {event.key for event in profiled(compiled, x)}


def _doubled(model: Any) -> None:
    model[0].weight.mul_(-2.0)


def _statistics(model: Any) -> None:
    model[1].running_mean.add_(1.0)


def profiled(model: Any, x: torch.Tensor) -> Any:
    """The profiled operators of one call."""
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(x)
    return profile.key_averages()


def test_without_a_compiler_the_rest_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_no_inductor", lambda examples: "no g++")
    model, x = alive(UNet()), small()
    (report,) = explain(model, x).reports
    assert report.compiler == "eager"
    assert "inductor has no compiler here, so the rest runs eagerly: no g++" in report.reasons
    with torch.no_grad():
        check_close(model, x, ours(model, rest="inductor")(x))


def test_a_module_with_none_says_so_once() -> None:
    model, x = Nothing().eval(), torch.randn(3, 8)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="found nothing for r18's kernels.* no convolution"):
            found = ours(model)(x)
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = ours(model)(x)
    torch.testing.assert_close(found, model(x), rtol=0, atol=0)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    assert "on r18's kernels (no backend): none" in str(explain(model, x))


def test_weights_that_change_are_followed() -> None:
    model, x = alive(UNet()), small()
    compiled = ours(model)
    with torch.no_grad():
        compiled(x)
        for change in (_in_place, _through_data, _new_parameter, _new_statistics, _loaded):
            before = compiled(x)[0]
            change(model)
            check_close(model, x, compiled(x))
            assert not torch.equal(compiled(x)[0], before)


def _in_place(model: Any) -> None:
    model.conv.weight.mul_(1.5)


def _through_data(model: Any) -> None:
    model.down[0].weight.data.mul_(-1.0)


def _new_parameter(model: Any) -> None:
    model.out.weight = nn.Parameter(model.out.weight * 2)


def _new_statistics(model: Any) -> None:
    model.norm.running_var.mul_(3.0)


def _loaded(model: Any) -> None:
    model.load_state_dict({k: v * 1.25 for k, v in model.state_dict().items()})


# -- what is left to the rest ------------------------------------------------------------------


def reasons(model: Any, x: torch.Tensor, **options: Any) -> str:
    """The report on the graph that is compiled for a call."""
    found: list[str] = []

    def compiler(graph: Any, examples: Any) -> Any:
        run, report = dynamo._compiled(graph, examples, None, {"rest": "eager", **options})
        found.append(str(report))
        return run

    torch.compile(model, backend=compiler)(x)
    return "\n".join(found)


def test_gradients_are_left_to_pytorch() -> None:
    model, x = alive(UNet()), small()
    said = reasons(model, x)
    assert "gradients are on" in said
    assert "on r18's kernels (no backend): none" in said
    compiled = ours(model)
    with pytest.warns(UserWarning, match="call it under torch.no_grad"):
        found = compiled(x)
    found[0].sum().backward()
    assert model.conv.weight.grad is not None
    with torch.no_grad():  # and is compiled again without them
        check_close(model, x, compiled(x))


def test_training_keeps_its_batchnorms() -> None:
    model, x = alive(UNet()).train(), small()
    with torch.no_grad():
        other = copy.deepcopy(model)
        assert "it is in training mode" in reasons(other, x)
        mine = copy.deepcopy(model)
        torch.testing.assert_close(ours(mine)(x), model(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.norm.running_mean, model.norm.running_mean)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_autocast_and_other_dtypes_are_left() -> None:
    model, x = alive(nn.Sequential(nn.Conv2d(3, 4, 3))), small()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "autocast is on" in reasons(model, x)
        torch._dynamo.reset()
        whole = copy.deepcopy(model).to(torch.complex64)
        assert "weights and images must be in one of" in reasons(whole, x.to(torch.complex64))


def test_dynamic_shapes_are_left() -> None:
    model = alive(nn.Sequential(nn.Conv2d(3, 4, 3)))
    compiled = ours(model)
    with torch.no_grad():
        check_close(model, small(), compiled(small()))
        with pytest.warns(UserWarning, match="its shape is dynamic.*dynamic=False"):
            found = compiled(small(20))
        torch.testing.assert_close(found, model(small(20)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.MaxPool2d(2, return_indices=True), "know no indices"),
        (nn.AdaptiveAvgPool2d(2), "whole images"),
        (nn.Conv2d(3, 4, 2, padding="same"), "even kernel"),
        (nn.Linear(16, 4), "4 dimensions"),
    ],
)
def test_settings_that_no_kernel_has_are_left(layer: nn.Module, why: str) -> None:
    model, x = layer.eval(), small()
    (report,) = explain(model, x).reports
    assert not report.ours
    assert why in "\n".join(report.reasons)


def test_a_weight_that_is_computed_is_left() -> None:
    class Standard(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(x, self.weight / self.weight.std(), self.bias)

    model, x = alive(Standard(3, 4, 3)), small()
    assert "is no parameter" in str(explain(model, x))
    with torch.no_grad():
        check_close(model, x, ours(model)(x))


class InPlace(nn.Module):
    """A module that changes tensors between fusible ops; fusing them would be wrong."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        y = self.conv(x)
        if self.way == "input":
            x.relu_()
            return y + x
        if self.way == "shortcut":
            z = x + 1
            z += y
            return z * 2 + x
        if self.way == "kept":
            z = y + x
            F.relu(y, inplace=True)
            return z + y
        x += y
        return torch.relu(x) + x


@pytest.mark.parametrize("way", ["input", "shortcut", "kept", "sum"])
def test_changes_in_place_stay_in_order(way: str) -> None:
    model, x = alive(InPlace(way)), small(channels=4)
    with torch.no_grad():
        check_close(model, x, ours(model)(x))
    assert "conv2d" in explain(model, x).reports[0].ours[0]


# -- choices -----------------------------------------------------------------------------------


def test_the_variable_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R18_BACKEND", "numpy")
    model, x = alive(nn.Sequential(nn.Conv2d(3, 4, 3))), small()
    assert explain(model, x).reports[0].backend == "numpy"
    monkeypatch.delenv("R18_BACKEND")
    assert explain(model, x).reports[0].backend in BACKENDS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "nunpy"}, UnknownName, "did you mean 'numpy'"),
        ({"bakend": "numpy"}, UsageError, "did you mean 'backend'"),
        ({"rest": "tvm"}, UsageError, "unknown compiler of the rest"),
        ({"precision": "fp16"}, UsageError, "the model is in torch.float32"),
        ({"backend": "test_int8:Elsewhere"}, BackendUnavailable, "it computes on cuda"),
    ],
)
def test_a_wrong_request_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, x = alive(nn.Sequential(nn.Conv2d(3, 4, 3))), small()
    with torch.no_grad(), pytest.raises(Exception, match=message) as caught:
        torch.compile(model, backend=compile_graph, options=options)(x)
    cause = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(cause, error)
    with pytest.raises(Exception, match="mode='max-autotune' is inductor's"), torch.no_grad():
        torch.compile(model, backend=compile_graph, mode="max-autotune")(x)


# -- torch.export ------------------------------------------------------------------------------


OPERATORS = {"add_relu": "add_relu_", "conv_bn_relu": "conv_bn_relu", "all": "resnet"}


@pytest.mark.parametrize("level", OPERATORS)
def test_a_drop_in_is_exported_saved_and_loaded(level: str) -> None:
    model, images = small_resnet(), pixels((33, 33), 1)
    fast = optimize_resnet(model, level, backend="numpy")
    with torch.no_grad():
        exported = torch.export.export(fast, (images,))
        names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert f"r18.{OPERATORS[level]}.default" in names
        assert exported.state_dict.keys() == model.state_dict().keys()
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        found = torch.export.load(file).module()(images)
    torch.testing.assert_close(found, fast(images), rtol=0, atol=0)
    if level != "all":  # outside of no_grad
        with pytest.raises(UsageError, match="have no gradient"):
            exported.module()(images)


@pytest.mark.parametrize(("level", "calls"), [("all", 1), ("add_relu", 5)])
def test_the_operators_of_a_drop_in_count_as_ours(level: str, calls: int) -> None:
    fast, images = optimize_resnet(small_resnet(), level, backend="numpy"), pixels((33, 33), 1)
    (report,) = explain(fast, images, options={"backend": "numpy"}).reports
    ours = [line for line in report.ours if "of a drop-in" in line]
    assert len(ours) == calls
    assert not any("resnet" in name or "add_relu" in name for name in report.rest)
    if level == "all":
        assert "on r18's kernels (a drop-in's backend): 1" in str(report)
        assert report.rest == {}
    compiled = torch.compile(fast, backend="r18", options={"backend": "numpy"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), fast(images), rtol=1e-4, atol=1e-5)


def test_an_exported_program_packs_its_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported program packs its weights once, even after the drop-in is gone."""
    model, images = small_resnet(), pixels((33, 33), 1)
    packed = []
    pack = Prepared._make
    monkeypatch.setattr(Prepared, "_make", lambda *args: packed.append(1) or pack(*args))
    with torch.no_grad():
        exported = torch.export.export(optimize_resnet(model, backend="numpy"), (images,)).module()
        gc.collect()
        assert torch.equal(exported(images), exported(images))
    assert len(packed) == 1


def test_few_caches_without_an_owner_are_kept() -> None:
    handles = [Followed().handle for _ in range(ORPHANS + 1)]
    first = followed(handles[0])
    assert followed(handles[0]) is first
    for handle in handles[1:]:
        followed(handle)
    assert followed(handles[0]) is not first
    assert followed(0) is not followed(0)
