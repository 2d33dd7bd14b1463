"""One kernel per op, floating-point precision and layout, each a call of `torch.nn.functional`.

`integers` has the quantised ops, `scaled` those of e4m3 numbers.

NOTE: inside `enqueue`, PyTorch allocates results from its caching allocator. They are copied to the
planned output. A reference may be slower than the kernels compared with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional as F

from r18.backend import (
    Array,
    Buffer,
    Kernel,
    RoundingContract,
    Stream,
    input_layout,
    output_layout,
)
from r18.graph.ops import (
    EXTRAS,
    Add,
    BatchNorm,
    Conv2d,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Shape,
    Softmax,
)
from r18.graph.precision import BF16, FP16, FP32, FP64, INT8, TF32, Precision, dtype_of
from r18_torch.device import DTYPES, TorchBuffer, TorchMemory, TorchStream

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[Any, Tensors, Tensors, torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class TorchKernel(Kernel):
    """A function over tensors as a kernel. 4-d tensors have the logical shape; strides follow the
    layout."""

    op: type[Op]
    algorithm: str
    precision: Precision
    contract: RoundingContract
    run: Run
    device: str
    layout: Layout = Layout.NCHW
    batch_invariant: bool = False
    in_place: bool = False
    deterministic: bool = True
    edges: tuple[int, ...] = ()
    extras: frozenset[str] = EXTRAS

    @property
    def id(self) -> str:
        return f"torch/{self.op.name}/{self.algorithm}/{self.precision}"

    def refusal(self, problem: Problem) -> str | None:
        if (wrong_op := super().refusal(problem)) is not None:
            return wrong_op
        if self.precision is TF32 and self.device != "cuda":
            return "tf32 is a format of CUDA's tensor cores; this is a CPU"
        return None

    def prepare(self, problem: Problem, weights: tuple[Array, ...]) -> tuple[Buffer, ...]:
        memory = TorchMemory(self.device)
        buffers = []
        kept = _numbers(problem, self.precision) or map(
            self.precision.stored, weights, problem.op.weights()
        )
        for stored in kept:
            buffers.append(memory.empty(stored.nbytes))
            memory.upload(stored, buffers[-1])
        return tuple(buffers)

    def enqueue(
        self,
        problem: Problem,
        inputs: tuple[Buffer, ...],
        weights: tuple[Buffer, ...],
        output: Buffer,
        workspace: Buffer,
        stream: Stream,
    ) -> None:
        dtype = DTYPES[self.precision.output_dtype(problem.op).name]
        given = [DTYPES[dtype.name] for dtype in self.precision.input_dtypes(problem.op)]
        read, write = input_layout(self, problem), output_layout(self, problem)
        cuda = cast(TorchStream, stream).cuda
        with (
            torch.inference_mode(),
            torch.cuda.stream(cuda) if cuda is not None else nullcontext(),
            _library_modes(self.precision) if cuda is not None else nullcontext(),
        ):
            self.run(
                problem.op,
                tuple(
                    _view(buffer, shape, stored, read)
                    for buffer, shape, stored in zip(inputs, problem.inputs, given, strict=True)
                ),
                tuple(
                    cast(TorchBuffer, buffer).as_tensor(shape, dtype)
                    for buffer, (shape, dtype) in zip(weights, self._kept(problem), strict=True)
                ),
                _view(output, problem.output, dtype, write),
            )

    def _kept(self, problem: Problem) -> list[tuple[Shape, torch.dtype]]:
        """Shape and dtype of each buffer that `prepare` makes."""
        if isinstance(problem.op, Normalize):
            return [((problem.op.channels,), DTYPES[self.precision.accumulate])] * 2
        return [
            (spec.shape, DTYPES[self.precision.weight_dtype(spec).name])
            for spec in problem.op.weights()
        ]


def _numbers(problem: Problem, precision: Precision) -> tuple[Array, ...]:
    """The constants of an op without weights: scale and shift of `Normalize`."""
    if not isinstance(problem.op, Normalize):
        return ()
    with np.errstate(over="ignore"):  # too large a value becomes infinity
        dtype = dtype_of(precision.accumulate)
        return tuple(np.array(values).astype(dtype) for values in problem.op.scale_shift)


def _view(
    buffer: Buffer, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout
) -> torch.Tensor:
    tensor = cast(TorchBuffer, buffer).as_tensor(layout.physical(shape), dtype)
    return tensor.permute(0, 3, 1, 2) if len(shape) == 4 and layout is Layout.NHWC else tensor


_MODES = threading.RLock()


@contextmanager
def _library_modes(precision: Precision) -> Iterator[None]:
    """Set cuDNN and cuBLAS to the kernel's precision. The switches are global, hence the lock.

    In int8, cuDNN is off: sums in float64 are exact as sums of products, which PyTorch's own
    convolution computes, and not as transforms, which cuDNN may choose.
    """
    with _MODES:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision is TF32
        try:
            with torch.backends.cudnn.flags(
                enabled=precision is not INT8,
                deterministic=True,
                benchmark=False,
                allow_tf32=precision is TF32,
            ):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


# -- the ops -----------------------------------------------------------------------------------


def _conv(op: Conv2d, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    x, weight = _multiplied(inputs[0], weights[0])
    y = F.conv2d(x, weight, None, op.stride, op.padding, op.dilation, op.groups)
    y = y.to(_wide(y))  # the epilogue adds in the accumulator's precision
    if op.bias:
        y += weights[1][:, None, None]
    if op.residual:
        y += inputs[1]
    if op.relu:
        y = y.relu_()
    out.copy_(y)


def _multiplied(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """The factors of a product in the precision that the library multiplies in.

    NOTE: on the CPU, float16 and bfloat16 are widened to float32, which is exact. PyTorch's own
    bfloat16 convolution there has two faults that the oracle found: with an odd number of channels
    an infinity reaches neighbouring outputs, and subnormals are read as zero. Its float16 is slow.
    """
    if x.is_cuda:
        return x, weight
    if x.shape[1] == 1 and x.ndim == 4:
        # NOTE: PyTorch's channels-last convolution of one channel is wrong where the output has one
        # column (docs/pytorch-one-column.md). NCHW has the same bytes there.
        x = x.reshape(-1).view(x.shape)
    return x.to(_wide(x)), weight.to(_wide(weight))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _batchnorm(op: BatchNorm, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    weight, bias, mean, var = weights
    out.copy_(F.batch_norm(inputs[0], mean, var, weight, bias, training=False, eps=op.eps))


def _relu(op: ReLU, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    out.copy_(F.relu(inputs[0]))


def _add(op: Add, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    torch.add(inputs[0], inputs[1], out=out)
    if op.relu:
        out.relu_()


def _maxpool(op: MaxPool2d, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    out.copy_(F.max_pool2d(inputs[0], op.kernel_size, op.stride, op.padding))


def _gap(op: GlobalAvgPool, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    x = inputs[0]
    out.copy_(x.to(_wide(x)).mean(dim=(2, 3)))


def _linear(op: Linear, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    y = F.linear(*_multiplied(inputs[0], weights[0]))
    out.copy_(y.to(_wide(y)) + weights[1])


def _softmax(op: Softmax, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    x = inputs[0]
    out.copy_(F.softmax(x, dim=1, dtype=_wide(x)))


def _relayout(op: Relayout, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    out.copy_(inputs[0])


def _normalize(op: Normalize, inputs: Tensors, weights: Tensors, out: torch.Tensor) -> None:
    scale, shift = (numbers[:, None, None] for numbers in weights)
    out.copy_((inputs[0] * scale).add_(shift))


def all_kernels(device: str) -> tuple[Kernel, ...]:
    """Every floating-point kernel on a device ("cpu" or "cuda"), NCHW before NHWC."""
    kernels: list[Kernel] = []
    for precision in (FP32, FP64, TF32, FP16, BF16):
        # On CUDA the library rounds the sum to storage before our epilogue adds to it.
        stored_sum = device == "cuda" and precision.storage != precision.accumulate

        def kernel(
            op: type[Op],
            algorithm: str,
            contract: str,
            run: Run,
            *,
            p: Precision = precision,
            stored_sum: bool = False,
            **options: Any,
        ) -> TorchKernel:
            rounding = RoundingContract(
                contract,
                p.accumulate,
                p.storage,
                # cuDNN and cuBLAS may use tensor cores for these, which truncate sums.
                truncates=device == "cuda" and contract == "sum" and p not in (FP32, FP64),
                stored_sum=stored_sum,
            )
            return TorchKernel(op, algorithm, p, rounding, run, device, **options)

        kernels += [
            kernel(Conv2d, "aten", "sum", _conv, stored_sum=stored_sum),
            kernel(Conv2d, "aten_nhwc", "sum", _conv, stored_sum=stored_sum, layout=Layout.NHWC),
            kernel(BatchNorm, "aten", "scale_shift", _batchnorm, batch_invariant=True),
            kernel(ReLU, "aten", "exact", _relu, batch_invariant=True),
            kernel(
                Add,
                "aten",
                "elementwise",
                _add,
                in_place=True,
                batch_invariant=True,
            ),
            kernel(MaxPool2d, "aten", "exact", _maxpool, batch_invariant=True),
            kernel(GlobalAvgPool, "aten", "mean", _gap),
            kernel(Linear, "aten", "sum", _linear, stored_sum=stored_sum),
            kernel(Softmax, "aten", "softmax", _softmax, batch_invariant=True),
            kernel(Relayout, "aten", "exact", _relayout, batch_invariant=True),
            kernel(Normalize, "aten", "normalize", _normalize, batch_invariant=True),
        ]
    return tuple(kernels)
