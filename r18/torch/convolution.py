"""One convolution with its BatchNorm and ReLU, and one sum with its ReLU, over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from r18.backend import Backend, Kernel, input_layout
from r18.errors import NoKernel
from r18.executor import choose_kernel, fastest_first, prepare_weights
from r18.ops import Add, BatchNorm, Conv2d, Layout, Problem, ReLU, Shape
from r18.passes import fold_weights, fuse
from r18.schedule import Schedule, Step
from r18.torch.followed import Derived, Packed, Prepared, Tensors
from r18.torch.storage import (
    capturing,
    dense,
    empty,
    enqueue,
    forbid_capture,
    host_array,
    layout_of,
    on_device,
)


def pick(backend: Backend, problem: Problem, precision: str, layout: Layout) -> Kernel:
    """The kernel for a problem whose input lies in a layout: of those that read it as it lies, if
    there is one, the fastest known, else the first listed.

    Raises `NoKernel`.
    """
    kernels = fastest_first(backend, backend.kernels(), problem, precision)
    try:
        as_it_lies = [
            kernel
            for kernel in kernels
            if kernel.layout is layout and input_layout(kernel, problem) is layout
        ]
        return choose_kernel(as_it_lies, problem, precision)
    except NoKernel:
        return choose_kernel(kernels, problem, precision, asked_by=f"backend '{backend.name}'")


# -- add, ReLU ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Sum:
    """ReLU(a + b) of tensors of one shape and layout. ready: it has run, so a capture may."""

    backend: Backend
    kernel: Kernel
    problem: Problem
    layout: Layout
    ready: bool = False

    def run(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Dense output in the layout of `a`; `b` is brought to that first, if it is not."""
        alignment = self.backend.memory.alignment
        with on_device(a.device):
            if not self.ready:
                forbid_capture(a.device, "the first run of a kernel")
            inputs = [dense(tensor, self.layout, alignment) for tensor in (a, b)]
            output = empty(a.shape, self.layout, a.dtype, a.device)
            enqueue(self.backend, self.kernel, self.problem, inputs, (), output)
        self.ready = True
        return output


def make_sum(backend: Backend, shape: Shape, layout: Layout, precision: str) -> Sum:
    """Raises `NoKernel`.

    A sum is elementwise: where no kernel has the tensor's layout, one of the other layout is
    given the same memory under the shape that it has there.
    """
    op = Add(relu=True)
    kernel = pick(backend, Problem(op, (shape, shape)), precision, layout)
    read = _as_read(layout.physical(shape), kernel.layout)
    problem = Problem(op, (read, read))
    if (reason := kernel.refusal(problem)) is not None:
        raise NoKernel(f"{kernel.id} refuses {problem}: {reason}")
    return Sum(backend, kernel, problem, layout)


def _as_read(physical: Shape, layout: Layout) -> Shape:
    """The logical shape of memory of that physical shape in a layout."""
    if len(physical) != 4 or layout is Layout.NCHW:
        return physical
    n, h, w, c = physical
    return (n, c, h, w)


# -- convolution, BatchNorm, ReLU --------------------------------------------------------------

WEIGHTS = ("conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
"""The tensors that a fused convolution is a function of, in the operator's order."""


@lru_cache(maxsize=256)
def conv_schedule(op: Conv2d, eps: float, shape: Shape) -> Schedule:
    """Convolution, BatchNorm and, if `op` has it, ReLU on images of (C, H, W), fused to a step."""
    bare = Conv2d(op.in_channels, op.out_channels, op.kernel_size, op.stride, op.padding)
    steps = [
        Step("conv", bare, ("image",), "conv", WEIGHTS[:1]),
        Step("bn", BatchNorm(op.out_channels, eps), ("conv",), "bn", WEIGHTS[1:]),
    ]
    if op.relu:
        steps.append(Step("relu", ReLU(), ("bn",), "relu"))
    return fuse(Schedule("conv_bn_relu", shape, tuple(steps), ()), "conv_bn_relu")


class Convolution(Derived):
    """A fused convolution of input of one shape and layout."""

    def __init__(
        self,
        backend: Backend,
        op: Conv2d,
        eps: float,
        x: torch.Tensor,
        weights: Tensors,
        precision: str,
    ) -> None:
        batch, *image = x.shape
        self._backend = backend
        self._schedule = conv_schedule(op, eps, tuple(image))
        (self._step,) = self._schedule.steps
        self._problem = self._schedule.problems(batch)[self._step.name]
        self._layout = layout_of(x)
        self._kernel = pick(backend, self._problem, precision, self._layout)
        self._ready = False
        self.prepared = Prepared(backend, x.device, self._pack, weights)

    def _pack(self, tensors: Tensors) -> Packed:
        given = dict(zip(WEIGHTS, map(host_array, tensors), strict=True))
        folded = fold_weights(self._schedule, given)
        names: Sequence[str] = self._step.weights
        arrays = [folded[name] for name in names]
        return (prepare_weights(self._kernel, self._problem, names, arrays),)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Dense output in the layout of `x`; between them the kernel's own, if it has another."""
        shape, theirs = self._problem.output, self._kernel.layout
        reads = input_layout(self._kernel, self._problem)
        with on_device(x.device):
            if not self._ready:
                forbid_capture(x.device, "the first run of a kernel")
            source = dense(x, reads, self._backend.memory.alignment)
            output = empty(shape, theirs, x.dtype, x.device)
            (weights,) = self.prepared.packed
            enqueue(self._backend, self._kernel, self._problem, [source], weights, output)
            if theirs is not self._layout:
                output = empty(shape, self._layout, x.dtype, x.device).copy_(output)
        self._ready = True
        self.captured = self.captured or capturing(x.device)
        return output
