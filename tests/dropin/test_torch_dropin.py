"""The drop-in: torchvision's ResNet-18 with a backend's kernels in it, as PyTorch uses modules."""

from __future__ import annotations

import copy
import inspect
import io
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import r18.torch.convolution
import r18.torch.network
import r18.torch.storage
import r18_cupy
import r18_numpy
from r18.backend import Array, Buffer, DeviceInfo, Enqueue, Memory, input_layout
from r18.backend.host import HostBuffer, HostKernel, HostMemory, HostStream
from r18.backend.registry import get_backend, installed
from r18.errors import BackendUnavailable, NoKernel, R18Error, ShapeError, UnknownName, UsageError
from r18.evaluate.margins import multiple
from r18.graph.ops import Add, Conv2d, Layout, Op, Problem, Relayout
from r18.graph.passes import fuse
from r18.graph.precision import FP32
from r18.graph.resnet import resnet18
from r18.runtime.plan import choose_kernel
from r18.torch import optimize_resnet18
from r18.torch.choice import choose
from r18.torch.convolution import make_sum, pick
from r18.torch.followed import KEPT, Followed
from r18.torch.operators import ops
from r18_cupy.cuda.device import CupyMemory
from r18_numpy.others import relayout
from support import compute, output_of, random_weights

LEVELS = ("add_relu", "conv_bn_relu", "all")
FUSED = LEVELS[1:]
SIZE, BATCH, CLASSES = 64, 2, 10
HERE = "test_torch_dropin"
"""This module's name, for backends named `test_torch_dropin:CLASS`."""


def compute_nhwc(
    op: Any, inputs: tuple[Array, ...], weights: tuple[Array, ...], out: Array, workspace: Array
) -> None:
    y = compute(op, [x.transpose(0, 3, 1, 2) if x.ndim == 4 else x for x in inputs], weights)
    out[...] = y.transpose(0, 2, 3, 1) if y.ndim == 4 else y


class Nhwc(r18_numpy.Backend):
    """A backend whose kernels all work in channels-last memory."""

    name = "nhwc"

    def kernels(self) -> tuple[Any, ...]:
        return tuple(
            HostKernel(
                "nhwc",
                kernel.op,
                kernel.algorithm,
                FP32,
                kernel.contract,
                relayout if kernel.op is Relayout else compute_nhwc,
                Layout.NHWC,
            )
            for kernel in super().kernels()
            if kernel.precision is FP32 and kernel.algorithm != "direct"
        )


@dataclass(frozen=True, eq=False)
class BoundKernel(HostKernel):
    """A kernel with a `bind` of its own."""

    def bind(self, problem: Problem, weights: tuple[Buffer, ...], memory: Memory) -> Enqueue:
        size = self.precision.dtype.itemsize
        given = [math.prod(shape) * size for shape in problem.inputs]
        made, scratch = math.prod(problem.output) * size, self.workspace(problem)

        def enqueue(inputs: Sequence[int], output: int, workspace: int, stream: int) -> None:
            BOUND.append((self.op, stream))
            self.enqueue(
                problem,
                tuple(memory.adopt(a, n, None) for a, n in zip(inputs, given, strict=True)),
                weights,
                memory.adopt(output, made, None),
                memory.adopt(workspace, scratch, None),
                HostStream(),
            )

        return enqueue


BOUND: list[tuple[type[Op], int]] = []
"""Each run of a bound kernel: its op, and the stream's handle."""


class Bound(r18_numpy.Backend):
    """NumPy's kernels as bound kernels."""

    name = "bound"

    def kernels(self) -> tuple[Any, ...]:
        return tuple(
            BoundKernel(**{field.name: getattr(kernel, field.name) for field in fields(kernel)})
            for kernel in super().kernels()
        )


class Elsewhere(r18_numpy.Backend):
    """A backend that claims to compute on a GPU."""

    name = "elsewhere"

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cuda", "a GPU that is not there")


CPU_BACKENDS = ["numpy", *(name for name in ("numba-cpu",) if name in installed()), f"{HERE}:Nhwc"]


@cache
def _network(classes: int, seed: int) -> Any:
    model = torchvision.models.resnet18(num_classes=classes)
    weights = random_weights(resnet18(classes=classes), seed)
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    model.load_state_dict(state, strict=False)
    return model.eval()


def network(classes: int = CLASSES, seed: int = 0) -> Any:
    """torchvision's ResNet-18 with seeded weights, in evaluation mode; a new one each time."""
    return copy.deepcopy(_network(classes, seed))


def pixels(batch: int = BATCH, size: tuple[int, int] = (SIZE, SIZE), seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    array = rng.normal(size=(batch, 3, *size)).astype(np.float32)
    return torch.from_numpy(array).clone()  # in PyTorch's memory, at an address aligned as it does


@cache
def algorithms(backend: str) -> tuple[str, ...]:
    return tuple(kernel.contract.algorithm for kernel in get_backend(backend).kernels())


def check_like(model: Any, images: torch.Tensor, logits: torch.Tensor, backend: str) -> None:
    """Check that a fast module's logits lose no more than a right program may, next to the model.

    Both losses are against float64; `r18.evaluate.margins` derives the multiple.
    """
    with torch.no_grad():
        own = model(images)
        exact = copy.deepcopy(model).double()(images.double())
    assert (logits.shape, logits.dtype, logits.device) == (own.shape, own.dtype, own.device)
    floor = exact.pow(2).mean().sqrt() * torch.finfo(own.dtype).eps / 2
    loss = max((own - exact).pow(2).mean().sqrt(), floor)
    lost = (logits - exact).pow(2).mean().sqrt()
    assert exact.abs().max() > 0.1
    assert lost <= multiple(algorithms(backend), FP32) * loss


# -- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_logits_are_the_models(backend: str, level: str, format: torch.memory_format) -> None:
    model = network()
    fast = optimize_resnet18(model, level, backend=backend)
    for seed in range(2):
        images = pixels(seed=seed).to(memory_format=format)
        check_like(model, images, fast(images), backend)


@pytest.mark.parametrize("level", LEVELS)
def test_any_size_batch_and_number_of_classes(level: str) -> None:
    model = network(classes=3)
    fast = optimize_resnet18(model, fuse=level, backend="numpy")
    for images in (pixels(1, (33, 70)), pixels(3, (64, 40)), pixels(1, (33, 70), seed=1)):
        check_like(model, images, fast(images), "numpy")
    assert fast(pixels(0)).shape == (0, 3)


@pytest.mark.parametrize("level", LEVELS)
def test_the_precision_is_the_models_unless_another_is_asked_for(level: str) -> None:
    model = network().double()
    fast = optimize_resnet18(model, level, backend="numpy")
    assert fast.precision == "fp64"
    images = pixels().double()
    with torch.no_grad():
        expected = model(images)
    torch.testing.assert_close(fast(images), expected, rtol=0, atol=1e-12 * expected.abs().max())


@pytest.mark.parametrize("level", FUSED)
def test_a_precision_changes_what_computes_and_not_what_goes_in_and_out(level: str) -> None:
    """A float64 precision keeps float32 inputs and outputs, and loses little more than the last
    rounding (with fusion `all`: the sum of `fc`)."""
    model = network()
    fast = optimize_resnet18(model, level, precision="fp64", backend="numpy")
    images = pixels()
    logits = fast(images)
    assert logits.dtype == torch.float32
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(images.double())
    ulps = {"all": 1, "conv_bn_relu": 8}[level]
    tolerance = ulps * torch.finfo(torch.float32).eps * exact.abs().max()
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=tolerance)


def test_autocast_is_the_models() -> None:
    """Autocast changes the precision as in the model; without kernels for it, that is an error."""
    fast = optimize_resnet18(network(), "add_relu", backend="numpy")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NoKernel, match="bf16"):
        fast(pixels())


@pytest.mark.parametrize("level", ["add_relu", "conv_bn_relu"])
def test_bound_kernels_compute_the_same(level: str) -> None:
    model = network()
    fast, bound = (optimize_resnet18(model, level, backend=b) for b in ("numpy", f"{HERE}:Bound"))
    BOUND.clear()
    for seed in range(2):
        torch.testing.assert_close(
            bound(pixels(seed=seed)), fast(pixels(seed=seed)), rtol=0, atol=0
        )
    assert BOUND.count((Add, 0)) == 16
    assert BOUND.count((Conv2d, 0)) == (40 if level == "conv_bn_relu" else 0)
    _in_place(model)
    torch.testing.assert_close(bound(pixels()), fast(pixels()), rtol=0, atol=0)


def test_a_bound_kernel_is_run_on_its_device_in_the_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = 0

    @contextmanager
    def device(index: int) -> Iterator[None]:
        nonlocal current
        before, current = current, index
        yield
        current = before

    def stream(index: int) -> int:
        return 100 * current + index

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream, raising=False)
    shape, backend = (2, 3), get_backend(f"{HERE}:Bound")
    run = make_sum(backend, shape, Layout.NCHW, "fp32", torch.device("cpu"))
    run._cuda = 1  # as if the tensors were there
    a, b = torch.randn(shape), torch.randn(shape)
    BOUND.clear()
    for _ in range(2):
        torch.testing.assert_close(run(a, b), torch.relu(a + b), rtol=0, atol=0)
    expected = torch.relu(a + b)
    assert run(a, b, over=True) is a
    torch.testing.assert_close(a, expected, rtol=0, atol=0)
    assert [(Add, 101)] * 3 == BOUND
    assert current == 0


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_tensors_are_read_and_written_where_they_are(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = optimize_resnet18(network(), level, backend="numpy")
    images = pixels()
    fast(images)
    adopted: set[int] = set()
    adopt = HostMemory.adopt

    def watched(memory: HostMemory, address: int, nbytes: int, owner: object) -> HostBuffer:
        adopted.add(address)
        return adopt(memory, address, nbytes, owner)

    def refused(memory: HostMemory, nbytes: int) -> HostBuffer:
        raise AssertionError("memory that is not PyTorch's")

    monkeypatch.setattr(HostMemory, "adopt", watched)
    monkeypatch.setattr(HostMemory, "empty", refused)
    logits = fast(images)
    if level != "add_relu":
        assert images.data_ptr() in adopted
    if level == "all":
        assert logits.data_ptr() in adopted


def test_a_kernel_never_sees_an_address_that_is_not_aligned() -> None:
    """A kernel gets only aligned addresses, although a slice of a tensor begins anywhere."""
    model = network()
    images = torch.cat([torch.zeros(1), pixels().reshape(-1)])[1:].reshape(BATCH, 3, SIZE, SIZE)
    assert images.is_contiguous()
    assert images.data_ptr() % HostMemory.alignment
    for level in FUSED:
        fast = optimize_resnet18(model, level, backend="numpy")
        torch.testing.assert_close(fast(images), fast(pixels()), rtol=0, atol=0)


def test_a_buffer_over_foreign_bytes_keeps_their_owner() -> None:
    memory = HostMemory()
    assert memory.adopts
    array = np.arange(64, dtype=np.float32)
    buffer = memory.adopt(array.ctypes.data, array.nbytes, array)
    buffer.view(4, 8).as_array((2,), np.dtype(np.float32))[:] = -1
    assert array[:4].tolist() == [0, -1, -1, 3]
    del array
    assert buffer.as_array((64,), np.dtype(np.float32))[63] == 63
    assert memory.adopt(0, 0, None).nbytes == 0


def test_cupys_memory_adopts_addresses_and_streams_without_a_copy() -> None:
    """CuPy's memory adopts addresses and streams, as far as that shows without a GPU."""
    pytest.importorskip("cupy")
    memory = CupyMemory()
    assert memory.adopts
    assert [memory.adopt_stream(handle).cuda.ptr for handle in (0, 4096)] == [0, 4096]
    buffer = memory.adopt(4096, 64, None)
    assert (buffer.address, buffer.nbytes) == (4096, 64)


def names_of(events: Any) -> list[str]:
    return [event.name for event in events if not event.name.startswith("ProfilerStep")]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_an_operator_asks_pytorch_for_its_memory_and_nothing_else(backend: str) -> None:
    """An operator calls PyTorch only for memory, since each call costs more than a launch."""
    x, *rest = conv_sample(channels=16, out=16, stride=1)
    if choose(backend, "cpu", "conv_bn_relu", "fp32").layout is Layout.NHWC:
        x = x.contiguous(memory_format=torch.channels_last)
    y = torch.ones_like(x)
    kept = Followed()
    calls: dict[str, Callable[[], Any]] = {
        "r18::add_relu": lambda: ops.add_relu.default(x, x, backend),
        "r18::add_relu_": lambda: ops.add_relu_.default(x, y, f"{HERE}:Bound"),
        "r18::conv_bn_relu": lambda: ops.conv_bn_relu.default(
            x, *rest, kept.handle, backend, "fp32"
        ),
    }
    with torch.inference_mode():
        for name, call in calls.items():
            call()
            with torch.profiler.profile() as found:
                call()
            ran = names_of(found.events())
            if name == "r18::add_relu_":
                assert ran == [name]
                continue
            workspace = ["aten::empty"] * ran.count("aten::empty")
            assert ran == [name, "aten::empty_strided", *workspace]
            assert len(workspace) <= 1


# -- the operators -----------------------------------------------------------------------------


def sum_samples() -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    dense, odd = torch.randn(2, 3, 5, 7), torch.randn(3, 5)
    last = dense.to(memory_format=torch.channels_last)
    return [
        (dense, torch.randn_like(dense)),
        (last, torch.randn_like(last)),
        (last, dense),
        (dense, last),
        (odd, odd.T.contiguous().T),
        (torch.randn(2, 3, 1, 1), torch.randn(2, 3, 1, 1)),
        (torch.randn(4, 6, 5, 5)[:, ::2], torch.randn(4, 3, 5, 5)),
        (torch.empty(0, 3), torch.empty(0, 3)),
    ]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("sample", range(len(sum_samples())))
def test_add_relu(backend: str, sample: int) -> None:
    a, b = sum_samples()[sample]
    got = ops.add_relu.default(a, b, backend)
    torch.testing.assert_close(got, torch.relu(a + b), rtol=0, atol=0)
    if a.is_contiguous() or a.is_contiguous(memory_format=torch.channels_last):
        assert got.stride() == a.stride()
    torch.library.opcheck(ops.add_relu.default, (a, b, backend))


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, f"{HERE}:Bound"])
@pytest.mark.parametrize("sample", range(len(sum_samples())))
def test_add_relu_in_place(backend: str, sample: int) -> None:
    a, b = sum_samples()[sample]
    expected, strides, address = torch.relu(a + b), a.stride(), a.data_ptr()
    torch.library.opcheck(ops.add_relu_.default, (a.clone(), b, backend))
    assert ops.add_relu_.default(a, b, backend) is None
    torch.testing.assert_close(a, expected, rtol=0, atol=0)
    assert (a.stride(), a.data_ptr()) == (strides, address)


@pytest.mark.parametrize("backend", ["numpy", f"{HERE}:Bound"])
def test_what_is_written_over_may_share_memory_with_what_is_added(backend: str) -> None:
    for shift in (0, 16, -16, 63, 64):
        memory = torch.randn(256)
        a, b = memory[64:128], memory[64 + shift : 128 + shift]
        expected = torch.relu(a + b)
        behind = memory[192:].clone()
        ops.add_relu_.default(a, b, backend)
        torch.testing.assert_close(a, expected, rtol=0, atol=0)
        torch.testing.assert_close(memory[192:], behind, rtol=0, atol=0)
    one = torch.randn(3, 1).expand(3, 4)
    with pytest.raises(RuntimeError, match="more than one element"):
        ops.add_relu_.default(one, torch.ones(3, 4), backend)


def test_a_kernel_that_may_not_write_over_its_input_never_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[tuple[int, int]] = []
    enqueue = HostKernel.enqueue

    def watched(kernel: Any, problem: Any, inputs: Any, weights: Any, output: Any, *rest: Any):
        written.append((inputs[0].array.ctypes.data, output.array.ctypes.data))
        enqueue(kernel, problem, inputs, weights, output, *rest)

    monkeypatch.setattr(HostKernel, "enqueue", watched)
    for backend in ("numpy", f"{HERE}:Nhwc"):
        a, b = pixels(), pixels(seed=1)
        expected = torch.relu(a + b)
        ops.add_relu_.default(a, b, backend)
        torch.testing.assert_close(a, expected, rtol=0, atol=0)
        ((read, out),) = written
        in_place = next(k.in_place for k in get_backend(backend).kernels() if k.op is Add)
        assert (read == out) == in_place == (backend == "numpy")
        written.clear()


def test_a_sum_in_place_is_counted_as_a_change() -> None:
    """An in-place sum counts as a change, so autograd refuses results of the old values."""
    x, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    y = x * 2
    square = (y * y).sum()
    version = y._version
    with torch.no_grad():
        ops.add_relu_.default(y, b, "numpy")
    assert y._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()
    with torch.inference_mode():
        made = torch.ones(2, 3)
        ops.add_relu_.default(made, b, "numpy")
        torch.testing.assert_close(made, torch.relu(b + 1), rtol=0, atol=0)


@pytest.mark.usefixtures("compiler")
def test_a_sum_in_place_compiled() -> None:
    def fresh(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a * 2
        ops.add_relu_.default(y, b, "numpy")
        return y

    def given(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ops.add_relu_.default(a, b, "numpy")
        return a.sum()

    a, b = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
    for function in (fresh, given):
        mine, compiled = a.clone(), a.clone()
        expected = function(mine, b)
        got = torch.compile(function, backend="aot_eager", fullgraph=True)(compiled, b)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        torch.testing.assert_close(compiled, mine, rtol=0, atol=0)


def conv_sample(
    channels: int = 3, out: int = 5, size: int = 3, stride: int = 2, relu: bool = True
) -> tuple[Any, ...]:
    torch.manual_seed(1)
    parameters = (
        torch.randn(out, channels, size, size),
        torch.rand(out) + 0.5,
        torch.randn(out),
        torch.randn(out),
        torch.rand(out) + 0.5,
    )
    return (torch.randn(2, channels, 9, 6), *parameters, 1e-3, [stride] * 2, [size // 2] * 2, relu)


def expected_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bn_weight: torch.Tensor,
    bn_bias: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    stride: list[int],
    padding: list[int],
    relu: bool,
) -> torch.Tensor:
    y = nn.functional.conv2d(x.double(), weight.double(), None, stride, padding)
    norm = [t.double() for t in (mean, var, bn_weight, bn_bias)]
    y = nn.functional.batch_norm(y, *norm, eps=eps)
    return torch.relu(y) if relu else y


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    "shape",
    [{}, {"size": 1, "relu": False}, {"size": 7, "stride": 1}, {"channels": 1, "out": 1}],
)
def test_conv_bn_relu(shape: dict[str, Any], backend: str, format: torch.memory_format) -> None:
    x, *rest = conv_sample(**shape)
    x = x.to(memory_format=format)
    got = ops.conv_bn_relu.default(x, *rest, 0, backend, "fp32")
    expected = expected_conv(x, *rest)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5 * expected.abs().max())
    assert got.is_contiguous(memory_format=format)
    kept = Followed()
    torch.library.opcheck(ops.conv_bn_relu.default, (x, *rest, kept.handle, backend, "fp32"))


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_conv_bn_relu_leaves_its_output_as_it_is_asked_to(
    backend: str, channels_last: bool, format: torch.memory_format
) -> None:
    x, *rest = conv_sample()
    x = x.to(memory_format=format)
    arguments = (x, *rest, 0, backend, "fp32")
    got = ops.conv_bn_relu.default(*arguments, channels_last)
    asked = torch.channels_last if channels_last else torch.contiguous_format
    assert got.is_contiguous(memory_format=asked)
    tolerance = 1e-5 * got.abs().max()
    torch.testing.assert_close(got, ops.conv_bn_relu.default(*arguments), rtol=0, atol=tolerance)
    torch.library.opcheck(ops.conv_bn_relu.default, (*arguments, channels_last))
    nothing = ops.conv_bn_relu.default(x[:0], *rest, 0, backend, "fp32", channels_last)
    assert nothing.shape == (0, *got.shape[1:])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_resnet18_as_an_operator(backend: str) -> None:
    model = network()
    names = resnet18(classes=CLASSES).weight_specs
    weights = [model.state_dict()[name] for name in names]
    eps = [m.eps for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    images = pixels(size=(32, 48))
    kept = Followed()
    arguments = (images, weights, eps, kept.handle, backend, "fp32")
    check_like(model, images, ops.resnet18.default(*arguments), backend)
    torch.library.opcheck(ops.resnet18.default, arguments)


def test_operators_refuse_what_they_cannot_do() -> None:
    a = torch.ones(2, 3)
    with pytest.raises(ShapeError, match="broadcasts nothing"):
        ops.add_relu.default(a, torch.ones(3), "numpy")
    with pytest.raises(UsageError, match="one dtype on one device"):
        ops.add_relu.default(a, a.double(), "numpy")
    with pytest.raises(UsageError, match=r"got torch\.int64"):
        ops.add_relu.default(a.long(), a.long(), "numpy")
    with pytest.raises(UnknownName, match="did you mean 'numpy'"):
        ops.add_relu.default(a, a, "nunpy")
    with pytest.raises(NoKernel, match="no kernel takes"):
        ops.add_relu.default(a.half(), a.half(), "numpy")
    with pytest.raises(BackendUnavailable, match="cannot adopt PyTorch's tensors"):
        ops.add_relu.default(a, a, "torch")
    with pytest.raises(ShapeError, match="broadcasts nothing"):
        ops.add_relu_.default(a, torch.ones(3), "numpy")
    with pytest.raises(UsageError, match="one dtype on one device"):
        ops.add_relu_.default(a, a.double(), "numpy")
    x, *rest = conv_sample()
    with pytest.raises(UsageError, match=r"in fp64 takes torch\.float64"):
        ops.conv_bn_relu.default(x, *rest, 0, "numpy", "fp64")
    with pytest.raises(ShapeError, match="expected 3 channels"):
        ops.conv_bn_relu.default(x[:, :2], *rest, 0, "numpy", "fp32")


def test_a_backward_pass_through_an_operator_is_an_error() -> None:
    a = torch.ones(2, 3, requires_grad=True)
    y = ops.add_relu.default(a, a.detach(), "numpy")
    with pytest.raises(UsageError, match="have no gradient"):
        y.sum().backward()
    b = torch.ones(2, 3)
    for first, second in ((a * 1, b), (b, a)):
        with pytest.raises(UsageError, match="have no gradient"):
            ops.add_relu_.default(first, second, "numpy")
    assert b.eq(1).all()


# -- as PyTorch uses modules -------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(level: str, mode: Callable[[], Any]) -> None:
    fast = optimize_resnet18(network(), level, backend="numpy")
    images = pixels()
    expected = fast(images)
    with mode():
        got = fast(images)
    assert not got.requires_grad
    assert got.is_inference() is (mode is torch.inference_mode)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_operators_pass_autograds_layer_by_and_no_other(level: str) -> None:
    keys = torch._C.DispatchKey
    layers = (keys.AutogradFunctionality, keys.ADInplaceOrView)

    def passed_by() -> list[bool]:
        return list(map(torch._C._dispatch_tls_is_dispatch_key_excluded, layers))

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            past.extend(passed_by())
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    past: list[bool] = []
    names: list[str] = []
    fast = optimize_resnet18(network(), level, backend="numpy")
    with torch.enable_grad():
        expected = fast(pixels())
        with Seen():
            got = fast(pixels())
        assert torch.is_grad_enabled()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(past)
    sums = 0 if level == "all" else 8
    assert names.count("r18.add_relu_.default") == sums  # none is hidden from a mode
    assert names.count("r18.resnet18.default") == (level == "all")
    assert not any(passed_by())
    version = got._version
    got.add_(1)  # an ordinary tensor: its changes are counted, and it may take part in a gradient
    assert got._version == version + 1
    assert not got.is_inference()
    assert (got * torch.ones(1, requires_grad=True)).requires_grad


def test_images_that_want_a_gradient_are_refused() -> None:
    fast = optimize_resnet18(network(), backend="numpy")
    images = pixels().requires_grad_()
    with pytest.raises(UsageError, match="has no gradient"):
        fast(images)
    with torch.no_grad():
        fast(images)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("level", "how"), [("conv_bn_relu", "aot_eager"), ("add_relu", "eager"), ("all", "aot_eager")]
)
def test_compiled_whole_and_followed(level: str, how: str) -> None:
    """torch.compile gives one graph without a break, which follows changes of the model."""
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    compiled = torch.compile(fast, backend=how, fullgraph=True)
    images = pixels()
    torch.testing.assert_close(compiled(images), fast(images), rtol=0, atol=0)
    for change in (_in_place, _new_parameter, _new_module, _other_eps):
        change(model)
        # A new module is looked at once, outside of the compiled graph.
        expected = fast(images)
        torch.testing.assert_close(compiled(images), expected, rtol=0, atol=0)
        check_like(model, images, expected, "numpy")


@pytest.mark.usefixtures("compiler")
def test_a_compiled_module_still_refuses_a_model_in_training_mode() -> None:
    model = network()
    compiled = torch.compile(optimize_resnet18(model, backend="numpy"), backend="eager")
    compiled(pixels())
    model.train()
    with pytest.raises(UsageError, match="is in training mode"):
        compiled(pixels())


def test_names_of_parameters_are_the_models() -> None:
    model = network()
    fast = optimize_resnet18(model, backend="numpy")
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
    assert not fast.training
    assert "fuse=all, precision=fp32, backend=numpy" in repr(fast)


def test_copies_stand_by_themselves() -> None:
    model = network()
    fast = optimize_resnet18(model, backend="numpy")
    images = pixels()
    expected = fast(images)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    copies = [copy.deepcopy(fast), torch.load(file, weights_only=False)]
    with torch.no_grad():
        model.fc.weight.zero_()
    for other in copies:
        torch.testing.assert_close(other(images), expected, rtol=0, atol=0)
        assert list(other.state_dict()) == list(model.state_dict())
    assert not torch.equal(fast(images), expected)


@pytest.mark.parametrize("level", FUSED)
def test_threads_do_not_disturb_each_other(level: str) -> None:
    fast = optimize_resnet18(network(), level, backend="numpy")
    batches = [pixels(1 + seed % 2, (40, 40), seed) for seed in range(4)]
    expected = [fast(batch) for batch in batches]
    errors: list[str] = []

    def work(offset: int) -> None:
        for turn in range(6):
            index = (offset + turn) % len(batches)
            if not torch.equal(fast(batches[index]), expected[index]):
                errors.append(f"thread {offset}, turn {turn}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_memory_of_past_shapes_is_given_back() -> None:
    fast = optimize_resnet18(network(), backend="numpy")
    expected = fast(pixels(1, (32, 32)))
    for size in range(33, 33 + KEPT + 2):
        fast(pixels(1, (32, size)))
    assert len(fast._whole._derived) == KEPT
    torch.testing.assert_close(fast(pixels(1, (32, 32))), expected, rtol=0, atol=0)


# -- the model is left alone, and followed -----------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_model_is_not_changed(level: str) -> None:
    model = network()
    images = pixels()
    with torch.no_grad():
        expected = model(images)
    before = copy.deepcopy(model.state_dict())
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    versions = [tensor._version for tensor in model.state_dict().values()]
    fast = optimize_resnet18(model, level, backend="numpy")
    fast(images)
    fast.eval().cpu().float()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert [tensor._version for tensor in model.state_dict().values()] == versions
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=0, atol=0)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.layer3[1].conv2.weight.mul_(1.5)


def _in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.layer1[0].bn2.running_mean.add_(0.5)


def _through_data(model: Any) -> None:
    model.layer2[0].downsample[0].weight.data.mul_(-1)


def _loaded(model: Any) -> None:
    model.load_state_dict(network(model.fc.out_features, seed=7).state_dict())


def _new_data(model: Any) -> None:
    model.bn1.weight.data = torch.full_like(model.bn1.weight, 0.75)


def _new_parameter(model: Any) -> None:
    model.fc.bias = nn.Parameter(torch.linspace(-1, 1, len(model.fc.bias)))


def _new_buffer(model: Any) -> None:
    norm = model.layer4[0].bn1
    norm.running_var = norm.running_var * 2


def _new_module(model: Any) -> None:
    torch.manual_seed(3)
    model.fc = nn.Linear(512, 7)


def _new_block(model: Any) -> None:
    model.layer1[1] = network(seed=5).layer1[0]


def _other_eps(model: Any) -> None:
    model.layer4[1].bn2.eps = 0.5


def _channels_last(model: Any) -> None:
    model.to(memory_format=torch.channels_last)


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__.strip("_"): change
    for change in (
        _in_place,
        _in_inference_mode,
        _through_data,
        _loaded,
        _new_data,
        _new_parameter,
        _new_buffer,
        _new_module,
        _new_block,
        _other_eps,
        _channels_last,
    )
}


@pytest.mark.parametrize("level", LEVELS)
def test_changes_of_the_model_are_followed(level: str) -> None:
    """Each change of the model is followed, one after another, and makes a difference.

    Channels-last weights are the same weights; if PyTorch convolves, it adds in another order.
    """
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    images = pixels()
    before = fast(images)
    for name, change in CHANGES.items():
        change(model)
        got = fast(images)
        check_like(model, images, got, "numpy")
        if name == "channels_last":
            assert level == "add_relu" or torch.equal(got, before)
        else:
            assert not torch.equal(got, before), name
        before = got


@pytest.mark.parametrize("level", LEVELS)
def test_a_cast_of_the_model_is_followed(level: str) -> None:
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    fast(pixels())
    model.double()
    with pytest.raises(
        UsageError, match=r"images are torch\.float32 .*the model is torch\.float64"
    ):
        fast(pixels())
    with torch.no_grad():
        expected = model(pixels().double())
    torch.testing.assert_close(fast(pixels().double()), expected, rtol=0, atol=1e-9)
    assert fast.precision == "fp64"
    model.half()
    with pytest.raises(NoKernel, match="no kernel takes"):
        fast(pixels().half())


def test_a_model_that_moved_is_followed_or_refused() -> None:
    """A model on a device that the backend does not use is refused; see below for one and back."""
    model = network()
    fast = optimize_resnet18(model, backend="numpy")
    model.to("meta")
    with pytest.raises(UsageError, match=r"images are .* on cpu, the model is .* on meta"):
        fast(pixels())
    with pytest.raises(BackendUnavailable, match="it computes on cpu, the model is on meta"):
        fast(pixels().to("meta"))


@pytest.mark.parametrize("level", FUSED)
def test_refresh_sees_what_nothing_else_shows(level: str) -> None:
    """`refresh` sees an element changed through `.data`, which PyTorch does not count."""
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    images = pixels()
    fast(images)
    model.conv1.weight.data[5, 1, 3, 3] += 10
    fast.refresh()
    check_like(model, images, fast(images), "numpy")


@pytest.mark.parametrize("level", FUSED)
def test_packed_weights_stay_where_they_are(level: str) -> None:
    """Packed weights stay at their addresses, where a user's CUDA graph may read them."""
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    fast(pixels())

    def places() -> list[int]:
        return [
            buffer.array.ctypes.data
            for kept in (fast._whole, *fast._convs)
            for derived in kept._derived.values()
            for buffers in derived.prepared.packed
            for buffer in buffers
        ]

    before = places()
    assert before
    _loaded(model)
    check_like(model, pixels(), fast(pixels()), "numpy")
    assert places() == before


# -- errors ------------------------------------------------------------------------------------


def _norm_in_training(model: Any) -> None:
    model.layer2[1].bn1.train()


def _hooked(model: Any) -> None:
    model.layer1.register_forward_hook(lambda *args: None)


def _other_activation(model: Any) -> None:
    model.layer3[0].relu = nn.ReLU6()


def _other_stride(model: Any) -> None:
    model.layer2[0].conv1.stride = (1, 1)


def _own_forward(model: Any) -> None:
    model.layer4[1].forward = lambda x: x


def _shorter(model: Any) -> None:
    model.layer4 = model.layer4[:1]


def _no_head(model: Any) -> None:
    model.fc = nn.Identity()


def _no_statistics(model: Any) -> None:
    model.bn1 = nn.BatchNorm2d(64, track_running_stats=False).eval()


def _added_shortcut(model: Any) -> None:
    model.layer1[0].downsample = nn.Sequential(nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64)).eval()


def _longer(model: Any) -> None:
    model.layer1.append(network(seed=5).layer1[0])


def _parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.layer1[0].conv1)


WRONG: dict[Callable[[Any], None], str] = {
    nn.Module.train: "the model is in training mode",
    _norm_in_training: r"module 'layer2\.1\.bn1' is in training mode",
    _hooked: "module 'layer1' has hooks",
    _other_activation: r"has a ReLU6 at layer3\.0\.relu, not a ReLU",
    _other_stride: r"has layer2\.0\.conv1 with stride=\(1, 1\), not \(2, 2\)",
    _own_forward: r"has a forward of its own at layer4\.1",
    _shorter: "has stages of 2, 2, 2, 1 blocks, not of 2, 2, 2, 2",
    _longer: "has stages of 3, 2, 2, 2 blocks",
    _no_head: "has a Identity at fc, not a Linear",
    _no_statistics: "has bn1 with track_running_stats=False, not True",
    _added_shortcut: r"has layer1\.0\.downsample, which ResNet-18 has not",
    _parametrized: r"module 'layer1\.0\.conv1' is parametrised \(weight\)",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_model_is_refused(change: Callable[[Any], None]) -> None:
    model = network()
    change(model)
    with pytest.raises(UsageError, match=WRONG[change]):
        optimize_resnet18(model, backend="numpy")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "change",
    WRONG,
    ids=lambda change: change.__name__,
)
def test_a_model_that_became_wrong_is_refused(level: str, change: Callable[[Any], None]) -> None:
    model = network()
    fast = optimize_resnet18(model, level, backend="numpy")
    change(model)
    with pytest.raises(UsageError, match=WRONG[change]):
        fast(pixels())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torchvision.models.resnet34, "has stages of 3, 4, 6, 3 blocks, not of 2, 2, 2, 2"),
        (torchvision.models.resnet50, r"has a Bottleneck at layer1\.0, not a BasicBlock"),
        (torchvision.models.squeezenet1_1, "is a SqueezeNet, no ResNet of torchvision"),
        (lambda: nn.Linear(2, 2), "is a Linear, no ResNet of torchvision"),
    ],
)
def test_another_network_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optimize_resnet18(make().eval(), backend="numpy")


def test_a_subclass_with_a_forward_pass_of_its_own_is_refused() -> None:
    class Features(torchvision.models.ResNet):
        def _forward_impl(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv1(x)

    model = Features(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2]).eval()
    with pytest.raises(UsageError, match="has a _forward_impl of its own"):
        optimize_resnet18(model, backend="numpy")


def test_weights_that_cannot_be_followed_are_refused() -> None:
    with torch.inference_mode():
        model = network()
    with pytest.raises(UsageError, match=r"conv1\.weight was made in inference mode"):
        optimize_resnet18(model, backend="numpy")
    mixed = network()
    mixed.fc.double()
    with pytest.raises(
        UsageError, match=r"of one dtype on one device, got .*float64.*\(fc\.weight"
    ):
        optimize_resnet18(mixed, backend="numpy")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fuse": "conv_bn"}, UsageError, "did you mean 'conv_bn_relu'"),
        ({"fuse": "none"}, UsageError, "known: add_relu, all, conv_bn_relu"),
        ({"precision": "fp23"}, UnknownName, "unknown precision 'fp23'"),
        ({"precision": "fp8"}, UsageError, "a drop-in has no fp8, which only programs of r18"),
        ({"precision": "int8"}, UsageError, "int8 needs a calibration"),
        ({"precision": "fp16"}, NoKernel, "no kernel takes"),
        ({"precision": "fp64", "fuse": "add_relu"}, UsageError, "fp64 was asked for"),
        ({"backend": "nunpy"}, UnknownName, "did you mean 'numpy'"),
        ({"backend": "torch"}, BackendUnavailable, "cannot adopt PyTorch's tensors"),
        (
            {"backend": f"{HERE}:Elsewhere"},
            BackendUnavailable,
            r"(?s)computes on cuda, the model is on cpu.*model\.to\('cuda'\)",
        ),
    ],
)
def test_a_wrong_request_is_refused(
    arguments: dict[str, str], error: type[R18Error], message: str
) -> None:
    with pytest.raises(error, match=message):
        optimize_resnet18(network(), **{"backend": "numpy", **arguments})


def test_wrong_images_are_refused() -> None:
    fast = optimize_resnet18(network(), backend="numpy")
    with pytest.raises(ShapeError, match=r"takes images \(N, 3, H, W\), got \(2, 1, 64, 64\)"):
        fast(pixels()[:, :1])
    with pytest.raises(ShapeError, match=r"got \(3, 64, 64\)"):
        fast(pixels()[0])
    for given, kind in ((np.zeros((2, 3, 64, 64), np.float32), "ndarray"), ([1.0], "list")):
        with pytest.raises(UsageError, match=rf"takes a tensor \(N, 3, H, W\), got a {kind}"):
            fast(given)
    with pytest.raises(UsageError, match=r"images are torch\.float16 on cpu"):
        fast(pixels().half())
    with pytest.raises(UsageError, match="on meta, the model is"):
        fast(pixels().to("meta"))


@pytest.mark.parametrize(
    "call",
    [
        lambda fast: fast.to(torch.float64),
        lambda fast: fast.half(),
        lambda fast: fast.to("meta"),
        lambda fast: fast.to(memory_format=torch.channels_last),
        lambda fast: fast.train(),
        lambda fast: fast.load_state_dict({}),
        lambda fast: fast.requires_grad_(False),
        lambda fast: setattr(fast, "fc", nn.Linear(512, 2)),
    ],
)
def test_what_would_change_the_model_is_refused(call: Callable[[Any], Any]) -> None:
    model = network()
    fast = optimize_resnet18(model, backend="numpy")
    with pytest.raises(UsageError, match="do that to the model that was given"):
        call(fast)
    check_like(model, pixels(), fast(pixels()), "numpy")


def test_what_changes_nothing_is_allowed() -> None:
    fast = optimize_resnet18(network(), backend="numpy")
    assert fast.to("cpu").eval().float().train(False) is fast
    assert fast.to(memory_format=torch.contiguous_format) is fast
    model = network().to(memory_format=torch.channels_last)
    fast = optimize_resnet18(model, backend="numpy")
    assert fast.to(memory_format=torch.channels_last).to("cpu") is fast
    with pytest.raises(UsageError, match="does not move, cast or reorder weights"):
        fast.to(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("level", LEVELS)
def test_the_images_have_torchvisions_name(level: str) -> None:
    model, images = network(), pixels()
    fast = optimize_resnet18(model, level, backend="numpy")
    assert inspect.signature(fast.forward).parameters.keys() == {"x"}
    assert torch.equal(fast(x=images), fast(images))


# -- the choice of a backend -------------------------------------------------------------------


def test_the_variable_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R18_BACKEND", "numpy")
    assert optimize_resnet18(network()).backend == "numpy"
    monkeypatch.setenv("R18_BACKEND", "torch")
    with pytest.raises(BackendUnavailable):
        optimize_resnet18(network())


def test_auto_takes_the_first_that_has_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R18_BACKEND", raising=False)
    fast = optimize_resnet18(network())
    assert fast.backend == ("numba-cpu" if "numba-cpu" in installed() else "numpy")
    check_like(fast._model, pixels(), fast(pixels()), fast.backend)
    for precision in ("tf32", "fp16x3"):
        with pytest.raises(BackendUnavailable) as caught:
            optimize_resnet18(network(), precision=precision)
        assert f"none computes a drop-in at level all in {precision} on cpu" in str(caught.value)
        assert "numpy: no kernel takes" in str(caught.value)


def test_kernels_are_those_that_read_tensors_as_they_lie() -> None:
    """A kernel is chosen that reads tensors in their own layout: a channels-last twin for those."""

    class Both(Nhwc):
        def kernels(self) -> tuple[Any, ...]:
            return (*super().kernels(), *r18_numpy.Backend().kernels())

    schedule = resnet18()
    for problem in schedule.problems(1).values():
        if problem.op.name not in ("conv2d", "add"):
            continue
        for layout in Layout:
            assert pick(Both(), problem, "fp32", layout).layout is layout
        only = pick(r18_numpy.Backend(), problem, "fp32", Layout.NHWC)
        assert only is choose_kernel(r18_numpy.Backend().kernels(), problem, "fp32")


def test_an_image_is_read_as_it_lies_and_what_is_behind_it_as_kernels_want_it() -> None:
    """On CUDA the first convolution reads NCHW and writes NHWC, which the others read and write."""
    backend = r18_cupy.Backend()
    first, *others = (
        problem
        for problem in fuse(resnet18(), "conv_bn_relu").problems(64).values()
        if problem.op.name == "conv2d"
    )
    for precision in ("tf32", "fp16", "bf16"):
        stem = pick(backend, first, precision, Layout.NCHW, Layout.NHWC)
        assert (input_layout(stem, first), stem.layout) == (Layout.NCHW, Layout.NHWC)
        for problem in others:
            kernel = pick(backend, problem, precision, Layout.NHWC, Layout.NHWC)
            assert (input_layout(kernel, problem), kernel.layout) == (Layout.NHWC, Layout.NHWC)


@pytest.mark.parametrize(
    ("backend", "layout"), [("numpy", Layout.NCHW), (f"{HERE}:Nhwc", Layout.NHWC)]
)
def test_behind_the_first_convolution_nothing_is_brought_to_another_layout(
    backend: str, layout: Layout
) -> None:
    """At most the image is copied to another layout, whatever layout images and weights have."""
    assert choose(backend, "cpu", "conv_bn_relu", "fp32").layout is layout
    model = network()
    fast = optimize_resnet18(model, "conv_bn_relu", backend=backend)
    for format in (torch.contiguous_format, torch.channels_last):
        images = pixels().contiguous(memory_format=format)
        with torch.inference_mode():
            fast(images)
            with torch.profiler.profile() as found:
                fast(images)
        direct = (format is torch.channels_last) is (layout is Layout.NHWC)
        assert names_of(found.events()).count("aten::clone") == (0 if direct else 1)


def test_without_pytorch_the_error_says_what_to_install() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from r18.errors import UsageError
from r18.torch import optimize_resnet18
try:
    optimize_resnet18(None)
except UsageError as error:
    print(error)
"""
    assert output_of(code).splitlines() == [
        "optimize_resnet18 needs PyTorch and torchvision: No module named 'torch'",
        "  pip install 'r18[torch]'",
    ]


def test_importing_the_package_imports_no_pytorch() -> None:
    assert output_of("import sys, r18.torch; print('torch' in sys.modules)") == "False"


# -- captures, without a GPU -------------------------------------------------------------------


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A switch that makes the CPU's stream look as if it were being captured."""

    def switch(on: bool) -> None:
        for module in (r18.torch.storage, r18.torch.convolution, r18.torch.network):
            monkeypatch.setattr(module, "capturing", lambda device: on)

    return switch


@pytest.mark.parametrize("level", LEVELS)
def test_a_capture_wants_a_run_before_it(level: str, capture: Callable[[bool], None]) -> None:
    from r18.torch.operators import _sum

    _sum.cache_clear()
    fast = optimize_resnet18(network(), level, backend="numpy")
    images = pixels(1, (48, 56))
    capture(True)
    with pytest.raises(UsageError, match=r"(?s)cannot be captured.*call the model once"):
        fast(images)
    capture(False)
    expected = fast(images)
    capture(True)
    torch.testing.assert_close(fast(images), expected, rtol=0, atol=0)


@pytest.mark.parametrize("level", FUSED)
def test_what_a_capture_read_is_kept(level: str, capture: Callable[[bool], None]) -> None:
    fast = optimize_resnet18(network(), level, backend="numpy")
    caches = [fast._whole] if level == "all" else fast._convs
    first = pixels(1, (32, 32))
    fast(first)
    capture(True)
    fast(first)
    capture(False)
    read = [next(iter(kept._derived.values())) for kept in caches]
    for size in range(33, 33 + 2 * (KEPT + 2), 2):
        fast(pixels(1, (32, size)))
    for derived, kept in zip(read, caches, strict=True):
        assert derived.captured
        assert derived in kept._derived.values()
        assert len(kept._derived) <= KEPT + 1


def test_changed_weights_cannot_be_packed_in_a_capture(capture: Callable[[bool], None]) -> None:
    model = network()
    fast = optimize_resnet18(model, backend="numpy")
    fast(pixels())
    _in_place(model)
    capture(True)
    with pytest.raises(UsageError, match="reading the model's weights cannot be captured"):
        fast(pixels())


# -- on a GPU ----------------------------------------------------------------------------------

GPU_PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def gpu() -> Iterator[str]:
    """The kind of device, if PyTorch and CuPy both reach one."""
    try:
        get_backend("cupy")
    except BackendUnavailable as error:
        pytest.skip(f"needs a GPU: {error.cause}")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch reaches")
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    yield "cuda"
    cudnn.allow_tf32, matmul.allow_tf32 = before


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("precision", GPU_PRECISIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_gpu_logits(gpu: str, level: str, precision: str, format: torch.memory_format) -> None:
    """GPU logits are right in the first run, the second, which captures, and later replays."""
    model = network().to(gpu, GPU_PRECISIONS[precision]).to(memory_format=format)
    fast = optimize_resnet18(model, level, backend="cupy")
    for seed in range(4):
        images = pixels(seed=seed).to(gpu, GPU_PRECISIONS[precision]).to(memory_format=format)
        check_like(model, images, fast(images), "cupy")


@pytest.mark.parametrize("level", LEVELS)
def test_gpu_work_is_ordered_in_the_current_stream(gpu: str, level: str) -> None:
    """GPU work waits for the caller's stream, whose input comes late and which reads the result."""
    fast = optimize_resnet18(network().to(gpu), level, backend="cupy")
    batches = [pixels(seed=seed).to(gpu) for seed in range(4)]
    expected = [fast(batch) for batch in batches]
    slow = torch.rand(2048, 2048, device=gpu)
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):
        images = torch.zeros_like(batches[0])
        for batch in batches:
            for _ in range(20):
                slow = slow @ slow / 1024
            images.copy_(batch)
            results.append(fast(images))
        torch.cuda.current_stream().synchronize()
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_gpu_capture_replays_over_new_images_and_weights(gpu: str, level: str) -> None:
    model = network().to(gpu)
    fast = optimize_resnet18(model, level, backend="cupy")
    images = pixels().to(gpu)
    with torch.inference_mode():
        fast(images)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = fast(images)
        images.copy_(pixels(seed=1))
        graph.replay()
        check_like(model, images, logits.clone(), "cupy")
    _in_place(model)
    fast.refresh()
    graph.replay()
    check_like(model, images, logits.clone(), "cupy")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("level", LEVELS)
def test_gpu_compiled(gpu: str, level: str, mode: str) -> None:
    model = network().to(gpu)
    fast = optimize_resnet18(model, level, backend="cupy")
    compiled = torch.compile(fast, mode=mode, fullgraph=True, dynamic=False)
    for seed in range(5):
        images = pixels(seed=seed).to(gpu)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            check_like(model, images, compiled(images).clone(), "cupy")


def test_gpu_memory_is_pytorchs(gpu: str) -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    for level in LEVELS:
        fast = optimize_resnet18(network().to(gpu), level, backend="cupy")
        for _ in range(3):
            fast(pixels().to(gpu))
        assert pool.used_bytes() <= before, level  # memory of other owners may be freed at any time


def test_gpu_model_moves_there_and_back(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R18_BACKEND", raising=False)
    model = network()
    fast = optimize_resnet18(model)
    on_cpu = fast.backend
    for device, backend in (("cpu", on_cpu), (gpu, "cupy"), ("cpu", on_cpu), (gpu, "cupy")):
        model.to(device)
        images = pixels().to(device)
        check_like(model, images, fast(images), backend)
        assert fast.backend == backend
        _in_place(model)
        check_like(model, images, fast(images), backend)


def test_gpu_operators(gpu: str) -> None:
    for a, b in sum_samples():
        a, b = a.to(gpu), b.to(gpu)
        torch.library.opcheck(ops.add_relu.default, (a, b, "cupy"))
        torch.library.opcheck(ops.add_relu_.default, (a.clone(), b, "cupy"))
        expected = torch.relu(a + b)
        ops.add_relu_.default(a, b, "cupy")
        torch.testing.assert_close(a, expected, rtol=0, atol=0)
    for shape in ({}, {"size": 1, "relu": False}, {"size": 7, "stride": 1}):
        arguments = [
            part.to(gpu) if isinstance(part, torch.Tensor) else part
            for part in conv_sample(**shape)
        ]
        torch.library.opcheck(ops.conv_bn_relu.default, (*arguments, 0, "cupy", "fp32"))
