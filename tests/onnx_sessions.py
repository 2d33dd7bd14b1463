"""ONNX Runtime as a backend: r18 sees calls of a library whose sources it does not have.

A kernel builds an ONNX model of its op, keeps the session that the library makes of it, and calls
that. `Backend` is right: its sessions are kept by all that their models depend on. `FAULTS` keep
state between calls as such plugins do by mistake; each is right in any single call of a fresh
process. From the folder tests/, `r18 verify --backend onnx_sessions:Backend` runs the right one,
and `onnx_sessions:FAULTY.NAME` one with a single fault.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from r18.backend import Array, Buffer, DeviceInfo, Kernel, RoundingContract, Stream
from r18.backend import Backend as BackendBase
from r18.backend.host import HostFunction, HostKernel, host
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Op,
    Problem,
    ReLU,
    Softmax,
)
from r18.graph.precision import FP32
from r18_oracle.check.turns import blas_threads

Arrays = tuple[Array, ...]
Key = Callable[[Any, Arrays, Arrays], Hashable]
OPSET, IR_VERSION = 17, 8

CONTRACTS: dict[type[Op], str] = {
    Conv2d: "sum",
    BatchNorm: "scale_shift",
    ReLU: "exact",
    Add: "elementwise",
    MaxPool2d: "exact",
    GlobalAvgPool: "mean",
    Linear: "sum",
    Softmax: "softmax",
}


# -- models ------------------------------------------------------------------------------------


class _Model:
    """An ONNX graph as it is written: its nodes in order, and its constants."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def do(self, operator: str, *given: str | Array, **attributes: Any) -> str:
        """Append an operator on named values and constant arrays; the name of its result."""
        names = [one if isinstance(one, str) else self.constant(one) for one in given]
        self.nodes.append(helper.make_node(operator, names, [f"{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])

    def constant(self, array: Array, name: str | None = None) -> str:
        name = name or f"constant {len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def write(self, op: Op) -> str:
        """Append the operators of an op on x0, x1, w0, w1, …; the name of its result."""
        match op:
            case Conv2d():
                (ph, pw), strides = op.padding, list(op.stride)
                given = ["x0", "w0", *(["w1"] if op.bias else [])]
                y = self.do("Conv", *given, strides=strides, pads=[ph, pw, ph, pw])
                y = self.do("Add", y, "x1") if op.residual else y
                return self.do("Relu", y) if op.relu else y
            case MaxPool2d():
                return self._max_pool(op)
            case BatchNorm():
                return self.do("BatchNormalization", "x0", "w0", "w1", "w2", "w3", epsilon=op.eps)
            case Add():
                y = self.do("Add", "x0", "x1")
                return self.do("Relu", y) if op.relu else y
            case Linear():
                return self.do("Gemm", "x0", "w0", "w1", transB=1)
            case ReLU():
                return self.do("Relu", "x0")
            case GlobalAvgPool():
                return self.do("Flatten", self.do("GlobalAveragePool", "x0"))
            case Softmax():
                return self.do("Softmax", "x0", axis=-1)
        raise NotImplementedError(op)

    def _max_pool(self, op: MaxPool2d) -> str:
        """Max-pooling by the library's Max: its MaxPool loses NaN, and -Inf becomes finite."""
        (kh, kw), (ph, pw) = op.kernel_size, op.padding
        pads, axes, steps = (np.array(v) for v in ([0, 0, ph, pw] * 2, [2, 3], op.stride))
        x = self.do("Pad", "x0", pads, np.array(-np.inf, np.float32))
        corners = itertools.product(range(kh), range(kw))
        windows = [
            self.do(
                "Slice",
                x,
                np.array([r, s]),
                np.array([r - kh + 1 or _TO_THE_END, s - kw + 1 or _TO_THE_END]),
                axes,
                steps,
            )
            for r, s in corners
        ]
        return self.do("Max", *windows)


_TO_THE_END = 2**62
"""The end of a slice that nothing is cut from."""


def session(op: Op, inputs: Arrays, weights: Arrays = (), baked: Arrays = ()) -> Any:
    """A session of the op for arrays of these shapes. baked: weights that are part of its model."""
    model = _Model()
    for index, weight in enumerate(baked):
        model.constant(weight, f"w{index}")
    y = model.write(op)
    given = {f"x{i}": x for i, x in enumerate(inputs)} | {f"w{i}": w for i, w in enumerate(weights)}
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in given.items()
    ]
    output = helper.make_tensor_value_info(y, TensorProto.FLOAT, None)
    graph = helper.make_graph(model.nodes, op.name, values, [output], model.constants)
    opset = helper.make_opsetid("", OPSET)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(
        helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )


def call(made: Any, inputs: Arrays, weights: Arrays = ()) -> Array:
    """The result of a session."""
    fed = {f"x{i}": x for i, x in enumerate(inputs)} | {f"w{i}": w for i, w in enumerate(weights)}
    (result,) = made.run(None, fed)
    return np.asarray(result)


# -- the right backend -------------------------------------------------------------------------


def everything(op: Any, inputs: Arrays, weights: Arrays) -> Hashable:
    """All that a session depends on."""
    return op, *(array.shape for array in (*inputs, *weights))


def sessions(key: Key = everything) -> HostFunction:
    """The session of the first call with this key, fed with inputs and weights."""
    kept: dict[Hashable, Any] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        name = key(op, inputs, weights)
        if name not in kept:
            kept[name] = session(op, inputs, weights)
        out[...] = call(kept[name], inputs, weights)

    return run


def made(op: type[Op], algorithm: str, run: HostFunction, **options: Any) -> HostKernel:
    return HostKernel("onnx", op, algorithm, FP32, _contract(op), run, **options)


def _contract(op: type[Op]) -> RoundingContract:
    return RoundingContract(CONTRACTS[op], "float32", "float32")


class Backend(BackendBase):
    """Every op of the network; with a fault's kernel in place of the right one of its op."""

    name = "onnx"

    def __init__(self, fault: Kernel | None = None) -> None:
        super().__init__()
        right = (made(op, "session", sessions()) for op in CONTRACTS)
        self._kernels = tuple(
            fault if fault is not None and fault.op is kernel.op else kernel for kernel in right
        )

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", f"ONNX Runtime {onnxruntime.__version__}")

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels


# -- the faults --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A mistake in what a plugin keeps between calls.

    made: a kernel with the mistake that has kept nothing yet. wrong: the mistake. said: how the
    finding names the state.
    """

    made: Callable[[], Kernel]
    wrong: str
    said: str


def _without(**fields: Any) -> Key:
    """All that a session depends on, except for these fields of the op."""
    return lambda op, x, w: everything(replace(op, **fields), x, w)


def _without_batch(op: Any, inputs: Arrays, weights: Arrays) -> Hashable:
    return op, *(x.shape[1:] for x in inputs), *(w.shape for w in weights)


def _id(op: Any, inputs: Arrays, weights: Arrays) -> Hashable:
    """The id of the weights' first array, which a later array may have too."""
    return everything(op, inputs, weights), id(weights[0])


def _sessions_with_weights(key: Key) -> HostFunction:
    """Sessions with the weights in their models, as an exported network has them."""
    kept: dict[Hashable, Any] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        name = key(op, inputs, weights)
        if name not in kept:
            kept[name] = session(op, inputs, baked=weights)
        out[...] = call(kept[name], inputs)

    return run


def _bound_by_address() -> HostFunction:
    """Copies an input to the library only the first time it sees the address."""
    sessions: dict[Hashable, Any] = {}
    copies: dict[Hashable, Arrays] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        key = everything(op, inputs, weights)
        if key not in sessions:
            sessions[key] = session(op, inputs, weights)
        where = key, *(x.ctypes.data for x in inputs)
        if where not in copies:
            copies[where] = tuple(x.copy() for x in inputs)
        out[...] = call(sessions[key], copies[where], weights)

    return run


def _one_output() -> HostFunction:
    """Lets all sessions of one output shape write to one buffer, and copies from there."""
    kept: dict[Hashable, Any] = {}
    outputs: dict[Hashable, Array] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        key = everything(op, inputs, weights)
        if key not in kept:
            kept[key] = session(op, inputs, weights)
        shared = outputs.setdefault(out.shape, np.empty_like(out))
        shared[...] = call(kept[key], inputs, weights)
        out[...] = shared

    return run


def _one_scratch() -> HostFunction:
    """Pads the image itself, in scratch that all calls of a shape share."""
    kept: dict[Hashable, Any] = {}
    padded: dict[Hashable, Array] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        (ph, pw), (n, c, h, w) = op.padding, inputs[0].shape
        key = everything(op, inputs, weights)
        if key not in padded:
            padded[key] = np.full((n, c, h + 2 * ph, w + 2 * pw), -np.inf, np.float32)
        scratch = padded[key]
        if key not in kept:
            kept[key] = session(replace(op, padding=(0, 0)), (scratch,))
        scratch[:, :, ph : ph + h, pw : pw + w] = inputs[0]
        out[...] = call(kept[key], (scratch,))

    return run


def _rows_per_thread() -> HostFunction:
    """Assigns rows to the threads of this call, but has buffers for the threads at planning."""
    kept: dict[Hashable, Any] = {}

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        key = everything(op, inputs, weights)
        if key not in kept:
            kept[key] = session(op, inputs, weights)
        now, planned = blas_threads(), workspace.nbytes // out.nbytes
        result = call(kept[key], inputs, weights).reshape(-1)
        for thread in range(min(now, planned)):
            out.reshape(-1)[thread::now] = result[thread::now]

    return run


def _planned_rows(problem: Problem) -> int:
    return 4 * blas_threads() * math.prod(problem.output)


@dataclass(frozen=True, eq=False)
class _ScalesInPlace(HostKernel):
    """Halves the weights for its session, in the caller's array if that is already float32."""

    def prepare(self, problem: Problem, weights: Arrays) -> tuple[Buffer, ...]:
        scaled = np.asarray(weights[0], np.float32)
        scaled *= np.float32(0.5)
        return super().prepare(problem, (scaled, *weights[1:]))


def _of_halved() -> HostFunction:
    right = sessions()

    def run(op: Any, inputs: Arrays, weights: Arrays, out: Array, workspace: Array) -> None:
        right(op, inputs, (weights[0] * np.float32(2), *weights[1:]), out, workspace)

    return run


@dataclass(frozen=True, eq=False)
class _ResultOfBuffer(HostKernel):
    """Returns the stored result if it has seen the same input buffer."""

    results: dict[int, tuple[Buffer, Array]] = field(default_factory=dict)

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        known, result = self.results.get(id(inputs[0]), (None, None))
        if known is inputs[0]:
            host(output).array[...] = result
            return
        super().enqueue(problem, inputs, weights, output, workspace, stream)
        self.results[id(inputs[0])] = inputs[0], host(output).array.copy()


FAULTS: dict[str, Fault] = {
    "session_without_stride": Fault(
        lambda: made(Conv2d, "session_without_stride", sessions(_without(stride=(1, 1)))),
        "keeps a session by the shapes and all settings but the stride",
        "after a call that differs in stride",
    ),
    "session_without_relu": Fault(
        lambda: made(Conv2d, "session_without_relu", sessions(_without(relu=False))),
        "keeps a session by all settings but the ReLU",
        "after a call that differs in relu only",
    ),
    "padding_of_first_call": Fault(
        lambda: made(Conv2d, "padding_of_first_call", sessions(_without(padding=(0, 0)))),
        "keeps the padding of the first call with the session",
        "after a call that differs in padding",
    ),
    "batch_of_first_call": Fault(
        lambda: made(GlobalAvgPool, "batch_of_first_call", sessions(_without_batch)),
        "keeps the batch of the first call in the session",
        "after a call that differs in n only",
    ),
    "weights_by_id": Fault(
        lambda: made(Linear, "weights_by_id", _sessions_with_weights(_id)),
        "keeps sessions that hold weights by the id() of their array",
        "freed",
    ),
    "input_by_address": Fault(
        lambda: made(ReLU, "input_by_address", _bound_by_address()),
        "keeps a copy of the input by its address",
        "after a call with other inputs at the same addresses",
    ),
    "result_by_object": Fault(
        lambda: _ResultOfBuffer("onnx", Add, "result_by_object", FP32, _contract(Add), sessions()),
        "keeps the result for an input that is the same object, whatever it holds now",
        "after a call with other inputs at the same addresses",
    ),
    "output_of_all_sessions": Fault(
        lambda: made(ReLU, "output_of_all_sessions", _one_output()),
        "lets two sessions write to one output buffer",
        "in turn with another program of its weights",
    ),
    "scratch_of_all_threads": Fault(
        lambda: made(MaxPool2d, "scratch_of_all_threads", _one_scratch()),
        "pads in scratch that two threads share",
        "in turn with another program of its weights",
    ),
    "weights_in_place": Fault(
        lambda: _ScalesInPlace(
            "onnx", Linear, "weights_in_place", FP32, _contract(Linear), _of_halved()
        ),
        "changes the caller's weights while it prepares them",
        "`prepare` wrote to the caller's weights",
    ),
    "threads_of_planning": Fault(
        lambda: made(Add, "threads_of_planning", _rows_per_thread(), scratch=_planned_rows),
        "divides its work by the threads of the call, with buffers for those of the planning",
        "on 3 thread(s) after it was planned for 1",
    ),
}
FAULTY = SimpleNamespace(
    **{name: partial(lambda fault: Backend(fault.made()), fault) for name, fault in FAULTS.items()}
)
"""Backends with one fault each, for the command line."""
