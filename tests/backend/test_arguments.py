"""Arguments of programs and kernels are accepted or refused with a message, never cast silently.

A program also checks the order of calls: it computes nothing before `load`, and fetches nothing
before it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch.nn.utils import parametrizations, prune

import r18
import r18_numpy
from r18.backend import CompileOptions, Program, Stream, prepare_plan
from r18.backend.host import HostMemory, HostStream
from r18.backend.registry import available
from r18.errors import ProgramClosed, R18Error, UnknownName, UsageError, WeightsError
from r18.graph.ops import Add, Conv2d, Linear, Normalize, Op, Problem, ReLU
from r18.graph.precision import BFLOAT16
from r18.graph.resnet import resnet18, tiny
from r18.images.preprocess import Preprocess
from r18.runtime.launch import run_kernel
from r18.runtime.plan import choose_kernel, make_plan
from r18.weights.synthetic import synthetic_weights
from support import images, random_weights

ANY: Any = None
SCHEDULE = tiny()
NUMPY = r18_numpy.Backend()


def program(**options: Any) -> Program:
    return NUMPY.compile(SCHEDULE, synthetic_weights(SCHEDULE), CompileOptions(**options))


# -- the order of a program's calls ------------------------------------------------------------


class Replayed(HostStream):
    """A stream whose captures are graphs: replaying one enqueues the same work again."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # as a first run, which loads the kernels
        return work


class Captured(r18_numpy.Backend):
    def stream(self) -> Stream:
        return Replayed()


class OwnParts(Program):
    """A backend's own program class, which loads and launches itself but checks as it should."""

    def load(self, images: Any) -> None:
        tensor = self._check_input(images.shape, images.dtype)
        self._memory.upload(images.astype(tensor.dtype), self._buffer(tensor.value))

    def launch(self) -> None:
        self._check_open()
        self._enqueue(self._launches)


class Own(r18_numpy.Backend):
    def program(self, plan: Any, weights: Any) -> Program:
        return OwnParts(self, plan, weights)


@pytest.mark.parametrize("backend", [r18_numpy.Backend(), Captured(), Own()])
def test_nothing_is_launched_before_it_is_loaded_or_fetched_before_it_is_launched(
    backend: Any,
) -> None:
    made = backend.compile(SCHEDULE, synthetic_weights(SCHEDULE), CompileOptions(taps=("layer1",)))
    batch = images(SCHEDULE, 1)
    for call in (made.launch, made.profile):
        with pytest.raises(UsageError, match="no batch to compute on: load one first"):
            call()
    for name in (None, "layer1", "image", "logits"):
        with pytest.raises(UsageError, match="was not computed yet: load a batch and launch first"):
            made.fetch(name)
    with pytest.raises(UsageError, match="not computed yet"):
        made.fetch_later()
    made.load(batch)
    np.testing.assert_array_equal(made.fetch("image"), batch)
    if type(made).launch is Program.launch:  # another's launch is its own matter
        for name in (None, "layer1"):
            with pytest.raises(UsageError, match="was not computed yet"):
                made.fetch(name)
    made.launch()
    logits = made.fetch()
    np.testing.assert_array_equal(logits, NUMPY.compile(*whole())(batch))
    made.load(batch * 2)  # the next batch under way: the last output is still there
    np.testing.assert_array_equal(made.fetch(), logits)
    made.close()
    with pytest.raises(ProgramClosed):
        made.launch()


def whole() -> tuple[Any, Any, CompileOptions]:
    return SCHEDULE, synthetic_weights(SCHEDULE), CompileOptions()


def test_a_profile_computes_what_may_be_fetched() -> None:
    made = program()
    made.load(images(SCHEDULE, 1))
    made.profile()
    np.testing.assert_array_equal(made.fetch(), program()(images(SCHEDULE, 1)))


def test_a_refused_batch_is_no_batch() -> None:
    made = program()
    for wrong in (np.zeros((1, 3, 4, 4), np.float32), np.zeros((1, 3, 32, 32), np.uint8)):
        with pytest.raises(R18Error):
            made.load(wrong)
        with pytest.raises(UsageError, match="load one first"):
            made.launch()


def test_an_arena_that_memory_does_not_hold_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty(memory: HostMemory, nbytes: int) -> Any:
        raise MemoryError("Unable to allocate")

    backend = r18_numpy.Backend()
    plan = make_plan(backend, SCHEDULE, CompileOptions(3))
    weights = synthetic_weights(SCHEDULE)
    prepared = prepare_plan(plan, weights)
    monkeypatch.setattr("r18.backend.program.prepare_plan", lambda *given: prepared)
    monkeypatch.setattr(HostMemory, "empty", empty)
    message = rf"needs {plan.arena_nbytes:,} bytes for batch 3, .*\n  take a smaller batch"
    with pytest.raises(UsageError, match=message):
        backend.program(plan, weights)


def test_a_program_takes_no_mask() -> None:
    masked = np.ma.masked_array(images(SCHEDULE, 1), mask=True)
    with pytest.raises(UsageError, match="knows no mask: fill the masked array first"):
        program()(masked)


# -- inputs of a kernel ------------------------------------------------------------------------


def kernel_for(op: Op, *shapes: tuple[int, ...], precision: str = "fp32") -> tuple[Any, Problem]:
    problem = Problem(op, shapes)
    return choose_kernel(NUMPY.kernels(), problem, precision), problem


WRONG_INPUTS: dict[str, Any] = {
    "complex": np.ones((2, 3), np.complex64),
    "int64": np.ones((2, 3), np.int64),
    "uint8": np.ones((2, 3), np.uint8),
    "bool": np.ones((2, 3), np.bool_),
    "<U1": np.full((2, 3), "1"),
    "object": np.ones((2, 3), object),
    "datetime64": np.ones((2, 3), "datetime64[s]"),
}


@pytest.mark.parametrize("kind", WRONG_INPUTS)
def test_an_input_of_another_kind_is_not_cast(kind: str) -> None:
    kernel, problem = kernel_for(ReLU(), (2, 3))
    message = rf"relu reads floating-point values or float32, got {kind}.*: nothing is cast"
    with pytest.raises(UsageError, match=message):
        run_kernel(NUMPY, kernel, problem, WRONG_INPUTS[kind])


def test_masks_and_lists_are_no_inputs() -> None:
    kernel, problem = kernel_for(ReLU(), (2, 3))
    with pytest.raises(UsageError, match="relu knows no mask"):
        run_kernel(NUMPY, kernel, problem, np.ma.masked_array(np.ones((2, 3)), mask=True))
    for given in ([[1.0, 2, 3]] * 2, torch.ones(2, 3), None):
        with pytest.raises(UsageError, match=r"relu reads NumPy arrays, got a \w+"):
            run_kernel(NUMPY, kernel, problem, given)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64])
def test_floating_point_inputs_are_rounded(dtype: Any) -> None:
    kernel, problem = kernel_for(ReLU(), (2, 3))
    given = np.array([[-1, 0.5, 2], [3, -4, 0]], dtype)
    got = run_kernel(NUMPY, kernel, problem, given)
    assert (got.dtype, got.tolist()) == (np.float32, [[0, 0.5, 2], [3, 0, 0]])


def test_pixels_are_bytes() -> None:
    normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    kernel, problem = kernel_for(normalize, (1, 3, 2, 2))
    pixels = np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2)
    expected = (pixels / 255 - 0.5) / 0.25
    np.testing.assert_allclose(run_kernel(NUMPY, kernel, problem, pixels), expected, atol=1e-6)
    for wrong in (np.float32, np.int8, np.uint16, np.bool_):
        with pytest.raises(UsageError, match=r"normalize reads uint8 pixels, got .*nothing is cas"):
            run_kernel(NUMPY, kernel, problem, pixels.astype(wrong))


@pytest.mark.parametrize("kind", WRONG_INPUTS)
def test_a_weight_of_another_kind_is_not_cast(kind: str) -> None:
    kernel, problem = kernel_for(Linear(3, 2), (4, 3))
    x, bias = np.ones((4, 3)), np.zeros(2)
    with pytest.raises(WeightsError, match=r"weight 'weight' must be a floating-point .*got "):
        run_kernel(NUMPY, kernel, problem, x, WRONG_INPUTS[kind], bias)
    weights = {**synthetic_weights(SCHEDULE)}
    name = "fc.weight"
    weights[name] = np.resize(WRONG_INPUTS[kind], weights[name].shape)
    with pytest.raises(WeightsError, match=r"weight 'fc\.weight' must be a floating-point"):
        NUMPY.compile(SCHEDULE, weights, CompileOptions())


@pytest.mark.parametrize("op", [ReLU(), Add(), Add(relu=True)], ids=lambda op: op.label)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4)])
def test_elementwise_results_have_the_inputs_shape(op: Op, shape: tuple[int, ...]) -> None:
    """Every backend gives results of the inputs' shape in every precision, even for a scalar."""
    problem = Problem(op, (shape,) * op.arity)
    for backend in available():
        for kernel in backend.kernels():
            if kernel.op is type(op) and kernel.refusal(problem) is None:
                inputs = [np.full(shape, value, np.float32) for value in (-2.5, 4)[: op.arity]]
                got = run_kernel(backend, kernel, problem, *inputs)
                assert got.shape == shape, kernel.id
                expected = sum(inputs) if isinstance(op, Add) else np.float32(0)
                assert (got.astype(np.float32) == expected).all(), kernel.id


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": "2"}, "batch must be an integer, got '2'"),
        ({"batch": 2.0}, "batch must be an integer, got 2.0"),
        ({"batch": True}, "batch must be an integer, got True"),
        ({"batch": None}, "batch must be an integer, got None"),
        ({"batch": 0}, "batch must be from 1 to .*, got 0"),
        ({"precision": None}, "unknown precision: expected a name, got None"),
        ({"precision": np.float32}, r"unknown precision: expected a name, got <class 'numpy\."),
        ({"precision": "fp23"}, "unknown precision 'fp23'"),
        ({"fusion": None}, "unknown fusion level: expected a name, got None"),
        ({"fusion": "al"}, "unknown fusion level 'al', did you mean 'all'"),
        ({"taps": 1}, "taps must be a tuple of checkpoint names, got 1"),
        ({"taps": ("layer1", 2)}, r"taps must be a tuple .*, got \('layer1', 2\)"),
        ({"taps": "layer11"}, "unknown checkpoint 'layer11', did you mean 'layer1'"),
        ({"graph": "no"}, "graph must be True or False, got 'no'"),
        ({"arena": 0}, "arena must be True or False, got 0"),
        ({"kernels": ["numpy/*"]}, r"kernels must be a mapping of .*, got \['numpy/\*'\]"),
        ({"kernels": {"conv1": None}}, "kernels must be a mapping of"),
        ({"pixels": True}, r"pixels must be None or a Normalize .*, got True"),
        ({"batches": 2}, "unknown option 'batches', did you mean 'batch'"),
    ],
)
def test_an_option_of_another_kind_is_refused_in_words(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(R18Error, match=message):
        r18.compile("tiny", synthetic_weights(SCHEDULE), "numpy", **options)


def test_options_are_taken_as_they_are_meant() -> None:
    assert CompileOptions(taps="layer1").taps == ("layer1",)  # type: ignore[arg-type]
    assert CompileOptions(taps=["layer1", "gap"]).taps == ("layer1", "gap")  # type: ignore[arg-type]
    assert type(CompileOptions(batch=np.int64(2)).batch) is int  # type: ignore[arg-type]
    assert CompileOptions(pixels=Preprocess().normalize).pixels is not None
    made = r18.compile("tiny", "synthetic", "numpy", taps="layer1")
    made(images(SCHEDULE, 1))
    assert made.fetch("layer1").shape == (1, 8, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "unknown network: expected a name, got None"),
        ((["tiny"],), r"unknown network: expected a name, got \['tiny'\]"),
        (("tiny", None), "weights must be a mapping of names to tensors, got a NoneType"),
        (("tiny", [1]), "weights must be a mapping of names to tensors, got a list"),
        (("tiny", "synthetic", 5), "a backend is chosen by its name, got 5"),
    ],
)
def test_arguments_of_compile_are_refused_in_words(arguments: Any, message: str) -> None:
    with pytest.raises(R18Error, match=message):
        r18.compile(*arguments, **({"backend": "numpy"} if len(arguments) < 3 else {}))


def test_a_backend_refuses_what_is_no_schedule_or_no_options() -> None:
    weights = synthetic_weights(SCHEDULE)
    with pytest.raises(UsageError, match="schedule must be a Schedule, got 'tiny'"):
        NUMPY.compile("tiny", weights, CompileOptions())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="options must be a CompileOptions, got None"):
        NUMPY.compile(SCHEDULE, weights, None)  # type: ignore[arg-type]


# -- weights of PyTorch ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    made = torchvision.models.resnet18(num_classes=10)
    state = random_weights(resnet18(classes=10))
    made.load_state_dict({n: torch.from_numpy(a) for n, a in state.items()}, strict=False)
    return made.eval()


def test_a_state_dict_of_pytorch_is_taken(model: Any) -> None:
    """A PyTorch state dict works with tensors that require gradients and with unused counters."""
    schedule = resnet18(classes=10, image_size=32)
    x = images(schedule, 1)
    with torch.no_grad():
        expected = model(torch.from_numpy(x)).numpy()
    state = model.state_dict()
    assert "bn1.num_batches_tracked" in state
    arrays = random_weights(resnet18(classes=10))
    want = r18.compile(schedule, arrays, "numpy")(x)
    np.testing.assert_allclose(want, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    given = dict(model.named_parameters()) | dict(model.named_buffers())
    assert given["conv1.weight"].requires_grad
    for weights in (state, given):
        np.testing.assert_array_equal(r18.compile(schedule, weights, "numpy")(x), want)
    layouts = {
        n: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for n, t in state.items()
    }
    np.testing.assert_array_equal(r18.compile(schedule, layouts, "numpy")(x), want)


def test_narrow_tensors_are_widened(model: Any) -> None:
    schedule = resnet18(classes=10, image_size=32)
    x = images(schedule, 1)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = {name: t.to(dtype) for name, t in model.state_dict().items()}
        wide = {name: t.float() for name, t in narrow.items()}
        got, want = (r18.compile(schedule, w, "numpy")(x) for w in (narrow, wide))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to(torch.complex64), r"got torch\.complex64 tensor: nothing is cast"),
        (lambda t: t.int(), r"got torch\.int32 tensor: nothing is cast"),
        (lambda t: t > 0, r"got torch\.bool tensor: nothing is cast"),
        (lambda t: t.to("meta"), "is no dense tensor on a device"),
        (lambda t: t.to_sparse(), "is no dense tensor on a device"),
        (lambda t: t.tolist(), "got list: nothing is cast"),
        (lambda t: None, "got NoneType: nothing is cast"),
        (lambda t: t[:5], r"has shape \(5, 512\)"),
        (lambda t: np.ma.masked_array(t.numpy(), mask=True), "is a masked array"),
    ],
)
def test_what_is_no_floating_point_tensor_is_refused(
    model: Any, change: Callable[[torch.Tensor], Any], message: str
) -> None:
    state = dict(model.state_dict())
    state["fc.weight"] = change(state["fc.weight"])
    with pytest.raises(WeightsError, match=rf"weight 'fc\.weight'.*{message}"):
        r18.compile(resnet18(classes=10), state, "numpy")


def test_a_module_and_a_pruned_state_are_refused(model: Any) -> None:
    schedule = resnet18(classes=10)
    with pytest.raises(UsageError, match=r"(?s)got a ResNet.*give model\.state_dict\(\)"):
        r18.compile(schedule, model, "numpy")
    conv = torchvision.models.resnet18(num_classes=10)
    prune.l1_unstructured(conv.layer1[0].conv1, "weight", amount=0.5)
    missing = r"(?s)needs the weight 'layer1\.0\.conv1\.weight', which is not given.*"
    with pytest.raises(WeightsError, match=missing + r"prune\.remove\(module, 'weight'\)"):
        r18.compile(schedule, conv.state_dict(), "numpy")
    conv = parametrizations.weight_norm(torchvision.models.resnet18(num_classes=10).layer1[0].conv1)
    state = {f"layer1.0.conv1.{name}": tensor for name, tensor in conv.state_dict().items()}
    rest = {n: t for n, t in model.state_dict().items() if not n.startswith("layer1.0.conv1")}
    with pytest.raises(WeightsError, match=missing + "remove_parametrizations"):
        r18.compile(schedule, rest | state, "numpy")
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"(?s)which is not given.*begin with 'module\.'"):
        r18.compile(schedule, wrapped, "numpy")


def test_a_path_is_a_source(tmp_path: Path) -> None:
    with pytest.raises(R18Error, match="nothing_here"):
        r18.compile("tiny", tmp_path / "nothing_here.npz", "numpy")


def test_the_options_of_a_conv_are_as_a_user_writes_them() -> None:
    conv: Any = Conv2d
    kernel, problem = kernel_for(conv(3, 4, 3, stride=2, padding=1), (1, 3, 5, 5))
    x, w = np.ones((1, 3, 5, 5)), np.ones((4, 3, 3, 3))
    assert run_kernel(NUMPY, kernel, problem, x, w).shape == (1, 4, 3, 3)


def test_an_unknown_name_is_still_one() -> None:
    with pytest.raises(UnknownName, match="did you mean 'numpy'"):
        r18.compile("tiny", "synthetic", "nunpy")
