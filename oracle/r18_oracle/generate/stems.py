"""The problems that a fused convolution and max-pooling kernel takes, found by trying a few.

Such a kernel is often written for one stem: its windows, images of three channels, and output
channels in multiples of a tile. It would take hardly any problem drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from r18.backend import Kernel
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem
from r18.runtime.arena import aligned
from r18_oracle.generate.sizes import MULTIPLES, takes
from r18_oracle.ops.window import Window, square

WINDOWS: tuple[tuple[Window, Window], ...] = (
    ((7, 2, 3), (3, 2, 1)),
    ((3, 1, 1), (2, 2, 0)),
    ((3, 2, 1), (3, 2, 1)),
    ((5, 1, 2), (3, 2, 0)),
    ((1, 1, 0), (3, 1, 1)),
)
"""Windows of a convolution and of the max-pooling after it: a ResNet's stem, and others, with and
without overlap."""

CHANNELS = (1, 2, 3, 4, 8, 16, 64)

PIXELS = 80
"""Pooled outputs per channel that a drawn problem must have room for: several tiles, the last one
partial."""


@dataclass(frozen=True)
class Stems:
    """The stems that a kernel takes; all, if it seems to take none.

    windows: some of `WINDOWS`. channels: of the input. multiple: what output channels must be a
    multiple of.
    """

    windows: tuple[tuple[Window, Window], ...] = WINDOWS
    channels: tuple[int, ...] = CHANNELS
    multiple: int = 1

    @classmethod
    def of(cls, kernel: Kernel) -> Stems:
        def asked(windows: tuple[Window, Window], c: int, o: int) -> bool:
            conv = Conv2d(c, o, *square(windows[0]), bias=True, relu=True)
            op = ConvMaxPool(conv, MaxPool2d(*square(windows[1])))
            return takes(kernel, Problem(op, ((1, c, 32, 32),)))

        windows = tuple(w for w in WINDOWS if any(asked(w, c, 64) for c in CHANNELS))
        if not windows:
            return cls()
        channels = tuple(c for c in CHANNELS if asked(windows[0], c, 64))
        multiple = next(m for m in MULTIPLES if asked(windows[0], channels[0], m))
        return cls(windows, channels, multiple)

    @property
    def every_window(self) -> bool:
        return self.windows == WINDOWS

    def room(self, max_elements: int, max_macs: int) -> tuple[int, int]:
        """The limits for drawn problems, raised if the kernel's channels alone would fill them."""
        if self.multiple == 1:
            return max_elements, max_macs
        of_conv, of_pool = self.windows[0]
        outputs = PIXELS * self.multiple * of_pool[1] ** 2  # of the convolution
        depth = self.channels[0] * math.prod((of_conv[0], of_conv[0]))
        return max(max_elements, outputs), max(max_macs, outputs * depth)


def near(problem: Problem) -> Iterator[Problem]:
    """The problem, and similar ones that a kernel for few stems may take.

    Output channels are rounded up, input channels are three or rounded up; with bias, with ReLU.
    """
    op, shape = problem.op, problem.inputs[0]
    assert isinstance(op, ConvMaxPool)
    own = (op.conv.bias, op.conv.relu)
    for bias, relu in dict.fromkeys((own, (True, op.conv.relu), (True, True))):
        for multiple in MULTIPLES:
            c, o = op.conv.in_channels, aligned(op.conv.out_channels, multiple)
            for channels in dict.fromkeys((c, 3, aligned(c, multiple))):
                conv = replace(op.conv, in_channels=channels, out_channels=o, bias=bias, relu=relu)
                yield Problem(replace(op, conv=conv), ((shape[0], channels, *shape[2:]),))


__all__ = ["WINDOWS", "Stems", "near"]
