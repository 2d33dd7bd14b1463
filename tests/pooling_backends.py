"""Backends that compute a convolution with its max-pooling in one kernel, in NumPy."""

from __future__ import annotations

from faulty_backends import Right, right
from r18.backend import Apart, Fastest, Preferred, RoundingContract
from r18.backend.host import HostKernel
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem
from r18.graph.precision import FP32, FP64, Precision


def pooled(precision: Precision = FP32, algorithm: str = "plain") -> HostKernel:
    """A fused kernel that is right for any window."""
    contract = RoundingContract("sum", precision.accumulate, precision.storage)
    return HostKernel("faulty", ConvMaxPool, algorithm, precision, contract, run=right)


def stem_alone(problem: Problem) -> str | None:
    """The refusal of a kernel that only takes the stem of a ResNet."""
    op = problem.op
    assert isinstance(op, ConvMaxPool)
    if (op.conv.kernel_size, op.conv.stride, op.conv.padding) != ((7, 7), (2, 2), (3, 3)):
        return "takes 7×7 windows of stride 2 alone"
    if op.pool != MaxPool2d((3, 3), (2, 2), (1, 1)):
        return "takes the pooling of a ResNet alone"
    return None if op.conv.relu else "always applies the ReLU"


class Pooling(Right):
    """A backend with every op, and the fused op in two precisions; one would be enough."""

    def kernels(self) -> tuple[HostKernel, ...]:
        return (*super().kernels(), pooled(), pooled(FP64))


class Tuned(Pooling):
    """A backend whose table says that the two ops are faster apart at batch 1."""

    def fastest(self, problem: Problem, precision: str) -> Fastest:
        if isinstance(problem.op, ConvMaxPool) and problem.batch == 1:
            return Apart()
        return Preferred("faulty/conv2d/plain/fp32") if isinstance(problem.op, Conv2d) else None
