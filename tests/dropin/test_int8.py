"""The drop-in in int8: `r18.compile`'s bits, with a calibration that fits."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision

import r18
import r18_numpy
from r18.backend import DeviceInfo
from r18.backend.registry import get_backend, installed
from r18.calibration import Method, calibrate
from r18.calibration.calibrate import IMAGES
from r18.errors import BackendUnavailable, NoKernel, R18Error, UsageError
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantization import GIVEN, Quantization
from r18.graph.resnet import resnet18
from r18.images.preprocess import Preprocess
from r18.torch import optimize_resnet18
from r18.torch.choice import choose
from r18.torch.integers import images_of
from r18.torch.operators import ops
from r18.weights import Weights, load_weights
from r18.weights.manifest import write_manifest
from support import random_weights

HERE = "test_int8"
"""This module's name, for backends named `test_int8:CLASS`."""
SIZE, CLASSES = 64, 10
FOLDED = fuse(resnet18(classes=CLASSES), "all")
BACKENDS = ["numpy", *(name for name in ("numba-cpu",) if name in installed())]
FAST = BACKENDS[-1]
"""The backend of tests that need no particular one."""


class Elsewhere(r18_numpy.Backend):
    """A backend that claims to compute on a GPU."""

    name = "elsewhere"

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cuda", "a GPU that is not there")


class Floats(r18_numpy.Backend):
    """A backend without int8 kernels."""

    name = "floats"

    def kernels(self) -> tuple[Any, ...]:
        return tuple(k for k in super().kernels() if k.precision is not INT8)


@cache
def _network(seed: int) -> Any:
    model = torchvision.models.resnet18(num_classes=CLASSES)
    weights = random_weights(resnet18(classes=CLASSES), seed)
    model.load_state_dict({n: torch.from_numpy(a) for n, a in weights.items()}, strict=False)
    return model.eval()


def network(seed: int = 0) -> Any:
    """torchvision's ResNet-18 with seeded weights, in evaluation mode; a new one each time."""
    return copy.deepcopy(_network(seed))


def images(count: int = 2, size: tuple[int, int] = (SIZE, SIZE), seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(count, 3, *size)).astype(np.float32)).clone()


CALIBRATION = images(3, seed=9)


def int8(model: Any, calibration: Any = CALIBRATION, **options: Any) -> Any:
    return optimize_resnet18(
        model, precision="int8", calibration=calibration, **{"backend": FAST, **options}
    )


def state_of(model: Any) -> dict[str, np.ndarray]:
    specs = resnet18(classes=CLASSES).weight_specs
    return {n: t.detach().float().numpy() for n, t in model.state_dict().items() if n in specs}


def weights_of(model: Any, found: Quantization | None) -> Weights:
    """The model's weights as `r18 quantize` would write them."""
    return Weights(state_of(model), "the model", Preprocess(), found)


def compiled(model: Any, found: Quantization, x: torch.Tensor, backend: str = FAST) -> np.ndarray:
    """The logits of `r18.compile` with this quantisation."""
    schedule = replace(resnet18(classes=CLASSES), input_shape=tuple(x.shape[1:]))
    program = r18.compile(
        schedule, weights_of(model, found), backend, batch=len(x), precision="int8"
    )
    logits: np.ndarray = program(x.float().numpy())
    return logits


def check(fast: Any, model: Any, x: torch.Tensor, backend: str = FAST) -> torch.Tensor:
    """The module's logits, after checking that they are those of `r18.compile`."""
    logits: torch.Tensor = fast(x)
    assert logits.dtype == x.dtype
    expected = torch.from_numpy(compiled(model, fast.quantization, x, backend))
    assert torch.equal(logits, expected.to(x.dtype))
    return logits


@cache
def _given(bits: int) -> Quantization:
    """A round-to-nearest quantisation of `network()`, calibrated without PyTorch."""
    how = Method("minmax", bits, "nearest")
    schedule = replace(FOLDED, input_shape=(3, SIZE, SIZE))
    pixels = images_of(CALIBRATION)
    return calibrate(get_backend(FAST), schedule, state_of(network()), pixels, how)


# -- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_logits_are_those_of_a_program_to_the_bit(
    backend: str, format: torch.memory_format
) -> None:
    model = network()
    fast = int8(model, backend=backend)
    assert (fast.precision, fast.backend) == ("int8", backend)
    for seed in range(2):
        x = images(seed=seed).to(memory_format=format)
        logits = check(fast, model, x, backend)
        with torch.no_grad():
            exact = model(x)
        assert (logits - exact).square().sum() < 0.01 * exact.square().sum()


def test_the_quantisation_is_the_one_of_r18_quantize() -> None:
    """The quantisation is that of `r18 quantize` with the same images, weights and backend."""
    fast = int8(network(), method="minmax")
    assert fast.quantization == _given(8)
    how = fast.quantization.calibration
    assert (how.method, how.rounding, how.images) == ("minmax", "nearest", 3)
    assert how.sha256 == images_of(CALIBRATION).sha256
    assert int8(network()).quantization.calibration.method == "mse"
    assert optimize_resnet18(network(), backend=FAST).quantization is None


def test_any_size_and_batch_with_one_calibration() -> None:
    model = network()
    fast = int8(model)
    found = fast.quantization
    for x in (images(1, (33, 70)), images(3, (64, 40)), images(1, (33, 70), seed=1)):
        check(fast, model, x)
    assert fast.quantization is found
    assert fast(images(0)).shape == (0, CLASSES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_and_logits_keep_the_models_dtype(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    fast = int8(model, CALIBRATION.to(dtype))
    check(fast, model, images().to(dtype))


def test_bits_and_method_arrive_at_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Method] = []

    def quick(*arguments: Any) -> Quantization:
        *others, how = arguments
        asked.append(how)
        return calibrate(*others, replace(how, rounding="nearest"))

    monkeypatch.setattr("r18.torch.integers.calibrate", quick)
    model = network()
    fast = int8(model, bits=4, method="percentile")
    assert asked == [Method("percentile", 4)]
    assert asked[0].chosen_rounding == "adaround"
    assert fast.quantization.bits == 4
    check(fast, model, images())


def test_compiled_by_pytorch() -> None:
    model = network()
    fast = int8(model)
    whole = torch.compile(fast, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(whole(images()), check(fast, model, images()))


# -- what a calibration may be -----------------------------------------------------------------


def test_batches_pairs_and_a_tensor_are_the_same_images() -> None:
    x, labels = images(5), torch.arange(5)
    expected = images_of(x)
    dataset = torch.utils.data.TensorDataset(x, labels)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    for given in (loader, [x[:2], x[2:]], iter([(x, labels)]), [[x[:4], labels], (x[4:],)]):
        found = images_of(given)
        assert np.array_equal(found.pixels, x.numpy())
        assert found.sha256 == expected.sha256
    assert images_of(x[:4]).sha256 != expected.sha256
    x += 1  # the images are a copy
    assert not np.array_equal(expected.pixels, x.numpy())


def test_no_more_images_are_read_than_are_used() -> None:
    read = 0

    def endless() -> Iterator[torch.Tensor]:
        nonlocal read
        while True:
            read += 1
            yield images(100, (2, 2), seed=read)

    assert len(images_of(endless())) == IMAGES == 256
    assert read == 3


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantisation_that_is_there(bits: int, tmp_path: Path) -> None:
    """A quantisation can be given alone, with weights, or as a folder from `r18 quantize`."""
    model, found = network(), _given(bits)
    out = tmp_path / "out"
    schedule = resnet18(classes=CLASSES)
    write_manifest(out, weights_of(model, found), schedule)
    logits = []
    for given in (found, weights_of(model, found), load_weights(str(out), schedule)):
        fast = int8(model, given)
        assert fast.quantization == found
        logits.append(check(fast, model, images()))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibration": None}, r"(?s)int8 needs a calibration.*`r18 quantize`.*calibration="),
        ({"precision": None}, "calibration is for precision='int8', and the model's own precision"),
        ({"precision": "fp32"}, "calibration is for precision='int8', and 'fp32' was asked for"),
        ({"precision": None, "calibration": None, "bits": 8}, "bits is for precision='int8'"),
        ({"precision": None, "calibration": None, "method": "mse"}, "method is for precision"),
        ({"fuse": "add_relu"}, "int8 is computed with fuse='all'.*asked for 'add_relu'"),
        ({"fuse": "conv_bn_relu"}, "int8 is computed with fuse='all'"),
        ({"calibration": []}, "the calibration holds no images"),
        ({"calibration": [images(0)]}, "the calibration holds no images"),
        ({"calibration": 8}, "float tensors of images .*, got a int"),
        ({"calibration": "folder"}, r"(?s)got the path 'folder'.*r18.load_weights\(FOLDER, r18"),
        ({"calibration": [{"image": 1}]}, "batch 0 of the calibration is a dict"),
        ({"calibration": [("a.png", 1)]}, "batch 0 of the calibration is a tuple of str"),
        ({"calibration": [images(1).byte()]}, r"batch 0 of the calibration is torch\.uint8\n"),
        ({"calibration": (images(2), torch.arange(2))}, r"batch 1 .* is torch\.int64"),
        ({"calibration": images(1)[0]}, r"batch 0 .* has shape \(3, 64, 64\)"),
        ({"calibration": images(1)[:, :1]}, r"has shape \(1, 1, 64, 64\)"),
        ({"calibration": images(1)[..., :0]}, r"has shape \(1, 3, 64, 0\)"),
        (
            {"calibration": [images(1), images(1, (64, 65))]},
            r"batch 1 .* images of shape \(3, 64, 65\), those before have \(3, 64, 64\)",
        ),
        (
            {"calibration": [images(1), images(1).index_fill(3, torch.tensor(5), float("nan"))]},
            "batch 1 of the calibration holds NaN or infinity",
        ),
        ({"calibration": images(1).double() * 1e60}, "batch 0 .* holds NaN or infinity"),
        ({"method": "mean"}, "unknown calibration method 'mean'"),
        ({"bits": 3}, "weights have 8, 4 or 2 bits, got 3"),
    ],
)
def test_a_wrong_calibration_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize_resnet18(
            network(),
            **{"precision": "int8", "calibration": CALIBRATION, "backend": "numpy", **arguments},
        )


def test_weights_without_a_quantisation_are_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)hold no quantisation.*r18 quantize --weights"):
        int8(network(), weights_of(network(), None))


@pytest.mark.parametrize("option", [{"bits": 8}, {"method": "minmax"}])
def test_a_quantisation_has_its_own_bits_and_method(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(UsageError, match=f"{name} is decided in the quantisation"):
        int8(network(), _given(8), **option)


def test_a_quantisation_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)does not fit the model: step 'conv1'.*units away"):
        int8(network(seed=1), _given(8))
    other = torchvision.models.resnet18(num_classes=3).eval()
    with pytest.raises(UsageError, match=r"step 'fc': its quantised weight has shape \(10, 512\)"):
        int8(with_the_body_of_network(other), _given(8))
    found = _given(8)
    for part in ("scales", "weights"):
        left = {n: v for n, v in getattr(found, part).items() if n not in ("conv1", "relu")}
        with pytest.raises(UsageError, match=r"has no (scale for 'relu'|weight for step 'conv1')"):
            int8(network(), replace(found, **{part: left}))


def with_the_body_of_network(model: Any) -> Any:
    state = {n: t for n, t in network().state_dict().items() if not n.startswith("fc.")}
    model.load_state_dict(state, strict=False)
    return model


def test_scales_that_were_chosen_need_no_calibration() -> None:
    """Given scales need no calibration; a full-range block, which no kernel takes, is refused."""
    found = replace(_given(8), calibration=GIVEN)
    assert int8(network(), found).quantization == found
    with pytest.raises(UsageError, match="the quantisation is full_range"):
        int8(network(), replace(found, full_range=True))


def test_a_bias_of_another_model_is_refused() -> None:
    model = network()
    with torch.no_grad():
        model.layer2[0].bn1.running_mean += 0.5  # in no weight, but in the folded bias
    with pytest.raises(UsageError, match=r"step 'layer2\.0\.conv1': the quantised bias is not"):
        int8(model, _given(8))


def test_weights_that_are_not_finite_are_refused() -> None:
    model = network()
    with torch.no_grad():
        model.layer1[0].bn1.weight[3] = float("nan")
    with pytest.raises(R18Error, match="not finite on a calibration image; check the weights"):
        int8(model)


# -- the model changes -------------------------------------------------------------------------


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.conv1.weight.mul_(1.5)


def _loaded(model: Any) -> None:
    model.load_state_dict(network(seed=1).state_dict())


def _replaced(model: Any) -> None:
    model.fc.weight = torch.nn.Parameter(model.fc.weight.detach() * 0.5)


def _epsilon(model: Any) -> None:
    model.bn1.eps = 0.5


CHANGES = (_in_place, _loaded, _replaced)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_calibrated_again(change: Callable[[Any], None]) -> None:
    model = network()
    fast = int8(model)
    before, found = fast(images()), fast.quantization
    change(model)
    after = check(fast, model, images())
    assert fast.quantization != found
    assert fast.quantization == int8(model).quantization
    assert not torch.equal(after, before)


def test_an_epsilon_is_followed() -> None:
    model = network()
    fast = int8(model)
    before = fast(images())
    _epsilon(model)
    assert torch.equal(fast(images()), int8(model)(images()))
    assert not torch.equal(fast(images()), before)


def test_refresh_sees_what_nothing_else_shows() -> None:
    model = network()
    fast = int8(model)
    before = fast(images())
    model.conv1.weight.data[5, 1, 3, 3] += 10
    assert torch.equal(fast(images()), before)
    fast.refresh()
    assert not torch.equal(check(fast, model, images()), before)


def test_packed_weights_stay_where_they_are() -> None:
    model = network()
    fast = int8(model)
    fast(images())

    def places() -> list[int]:
        return [
            buffer.array.ctypes.data
            for derived in fast._whole._derived.values()
            for buffers in derived.prepared.packed
            for buffer in buffers
        ]

    before = places()
    assert before
    _loaded(model)
    check(fast, model, images())
    assert places() == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_given_quantisation_does_not_outlive_its_weights(change: Callable[[Any], None]) -> None:
    """A given quantisation is refused once weights change, and works when they are restored."""
    model = network()
    fast = int8(model, _given(8))
    before = fast(images())
    change(model)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"(?s)does not fit the model.*give images"):
            fast(images())
    with pytest.raises(UsageError, match="does not fit the model"):
        _ = fast.quantization
    model.load_state_dict(network().state_dict())
    assert torch.equal(fast(images()), before)


def test_copies_stand_by_themselves() -> None:
    model = network()
    fast = int8(model)
    expected = fast(images())
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(images()), expected)
        assert other.quantization == fast.quantization
    _in_place(model)
    assert not torch.equal(fast(images()), expected)


# -- where it computes -------------------------------------------------------------------------


def test_a_backend_without_integers_is_refused_and_others_are_named() -> None:
    with pytest.raises(NoKernel, match=r"(?s)backend 'floats'.*int8 is computed by .*numpy on cpu"):
        int8(network(), backend=f"{HERE}:Floats")
    with pytest.raises(BackendUnavailable, match=r"(?s)computes on cuda.*model\.to\('cuda'\)"):
        int8(network(), backend=f"{HERE}:Elsewhere")


def test_on_a_gpu_the_error_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R18_BACKEND", raising=False)
    with pytest.raises(BackendUnavailable) as caught:
        choose(None, "cuda", "all", "int8")
    text = str(caught.value)
    assert "none computes a drop-in at level all in int8 on cuda" in text
    assert re.search(r"int8 is computed by .*numpy on cpu", text)
    with pytest.raises(BackendUnavailable, match=r"model\.to\('cpu'\)"):
        choose("numpy", "cuda", "all", "int8")


def test_auto_takes_the_fastest_with_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R18_BACKEND", raising=False)
    assert choose(None, "cpu", "all", "int8").backend == FAST


def test_the_operator_needs_the_cache_of_a_calibrated_module() -> None:
    model = network()
    fast = int8(model)
    tensors = fast._architecture.tensors()
    eps = [norm.eps for norm in fast._architecture.norms]
    arguments = (images(), tensors, eps)
    assert torch.equal(ops.resnet18(*arguments, fast._whole.handle, FAST, "int8"), fast(images()))
    with pytest.raises(UsageError, match="needs the cache of a module that was calibrated"):
        ops.resnet18(*arguments, 0, FAST, "int8")
