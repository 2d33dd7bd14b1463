"""One convolution with its BatchNorm and ReLU, and one sum with its ReLU, over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from r18.backend import Backend, Kernel, input_layout, prepare_weights
from r18.backend.launch import refusal_of
from r18.errors import NoKernel
from r18.graph.ops import Add, BatchNorm, Conv2d, Layout, Problem, ReLU, Shape
from r18.graph.passes import fold_weights, fuse
from r18.graph.schedule import Schedule, Step
from r18.runtime.plan import choose_kernel, fastest_first
from r18.torch.followed import Derived, Packed, Prepared, Tensors
from r18.torch.storage import FORMATS, Run, capturing, host_array, layout_of, storage_dtype


def pick(
    backend: Backend, problem: Problem, precision: str, layout: Layout, wanted: Layout | None = None
) -> Kernel:
    """The kernel for a problem, given the input's layout and the wanted layout of the output.

    Kernels that read `layout` and write `wanted` come first, then those that read and write
    `wanted`, then those that read and write `layout`. Among equals the fastest known kernel is
    chosen, otherwise the first listed. So the first convolution takes an NCHW image and writes the
    layout that the next ones read. Raises `NoKernel`.
    """
    wanted = wanted or layout
    kernels = fastest_first(backend, backend.kernels(), problem, precision)
    for reads, writes in ((layout, wanted), (wanted, wanted), (layout, layout)):
        able = [
            kernel
            for kernel in kernels
            if kernel.layout is writes and input_layout(kernel, problem) is reads
        ]
        try:
            return choose_kernel(able, problem, precision)
        except NoKernel:
            continue
    return choose_kernel(kernels, problem, precision, asked_by=f"backend '{backend.name}'")


# -- add, ReLU ---------------------------------------------------------------------------------


def make_sum(
    backend: Backend, shape: Shape, layout: Layout, precision: str, device: torch.device
) -> Run:
    """ReLU(a + b) of tensors of one shape, with the output in this layout; inputs in another layout
    are converted. Raises `NoKernel`.

    A sum is elementwise: if no kernel has the tensor's layout, a kernel of the other layout gets
    the same memory with a permuted shape.
    """
    op = Add(relu=True)
    kernel = pick(backend, Problem(op, (shape, shape)), precision, layout)
    read = _as_read(layout.physical(shape), kernel.layout)
    problem = Problem(op, (read, read))
    if (reason := refusal_of(kernel, problem)) is not None:
        raise NoKernel(f"{kernel.id} refuses {problem}: {reason}")
    dtype = storage_dtype(precision)
    return Run(backend, kernel, problem, layout, layout, shape, dtype, device)


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
    bare = replace(op, relu=False)
    steps = [
        Step("conv", bare, ("image",), "conv", WEIGHTS[:1]),
        Step("bn", BatchNorm(op.out_channels, eps), ("conv",), "bn", WEIGHTS[1:]),
    ]
    if op.relu:
        steps.append(Step("relu", ReLU(), ("bn",), "relu"))
    return fuse(Schedule("conv_bn_relu", shape, tuple(steps), ()), "conv_bn_relu")


class Convolution(Derived):
    """A fused convolution for one input shape and layout, with the output in the wanted layout."""

    def __init__(
        self,
        backend: Backend,
        op: Conv2d,
        eps: float,
        x: torch.Tensor,
        weights: Tensors,
        precision: str,
        wanted: Layout,
    ) -> None:
        batch, *image = x.shape
        self._schedule = conv_schedule(op, eps, tuple(image))
        (self._step,) = self._schedule.steps
        self._problem = problem = self._schedule.problems(batch)[self._step.name]
        self._kernel = kernel = pick(backend, problem, precision, layout_of(x), wanted)
        reads, writes = input_layout(kernel, problem), kernel.layout
        self._format = None if writes is wanted else FORMATS[wanted]
        self.prepared = Prepared(backend, x.device, self._pack, weights)
        (packed,) = self.prepared.packed  # which stay where they are, whatever becomes of them
        self._run = Run(
            backend, kernel, problem, reads, writes, problem.output, x.dtype, x.device, packed
        )

    def _pack(self, tensors: Tensors) -> Packed:
        given = dict(zip(WEIGHTS, map(host_array, tensors), strict=True))
        folded = fold_weights(self._schedule, given)
        names: Sequence[str] = self._step.weights
        arrays = [folded[name] for name in names]
        return (prepare_weights(self._kernel, self._problem, names, arrays),)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Dense output; a copy where the kernel has another layout than is wanted."""
        output = self._run(x)
        if self._format is not None:
            output = output.contiguous(memory_format=self._format)
        if not self.captured:
            self.captured = capturing(x.device)
        return output
