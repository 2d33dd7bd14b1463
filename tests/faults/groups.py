"""Convolutions of several groups, and dilated ones, that are wrong in one place each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from faults.conv import CONV, Conv
from faults.fault import Fault, fault, kernel
from r18.backend import Array
from r18.graph.ops import EXTRAS, Conv2d

Arrays = tuple[Array, ...]


def row(op: Conv2d, i: Array, r: int, height: int) -> Array:
    """The image's row that tap r of output row i reads."""
    return i * op.stride[0] - op.padding[0] + r * op.dilation[0]


def column(op: Conv2d, j: Array, s: int, width: int) -> Array:
    return j * op.stride[1] - op.padding[1] + s * op.dilation[1]


DILATED = replace(CONV, row=row, column=column)


def own(op: Conv2d, group: int) -> Array:
    """The input channels that a group reads."""
    return group * op.group_channels + np.arange(op.group_channels)


def run_of(op: Conv2d, group: int) -> Array:
    """The output channels that a group makes."""
    size = op.out_channels // op.groups
    return group * size + np.arange(size)


@dataclass(frozen=True)
class Grouped:
    """A convolution group by group, in pieces that can be replaced."""

    reads: Callable[[Conv2d, int], Array] = own
    makes: Callable[[Conv2d, int], Array] = run_of
    conv: Conv = DILATED

    def __call__(
        self, op: Conv2d, inputs: Arrays, weights: Arrays, out: Array, workspace: Array
    ) -> None:
        for group in range(op.groups):
            made = self.makes(op, group)
            one = replace(op, in_channels=op.group_channels, out_channels=len(made), groups=1)
            given = inputs[0][:, self.reads(op, group)], *(r[:, made] for r in inputs[1:])
            part = out[:, made]
            out[:, made] = self.conv.result(one, given, tuple(w[made] for w in weights), part)


GROUPED = Grouped()


def grouped(name: str, wrong: str, **pieces: Any) -> Fault:
    return fault(Conv2d, name, wrong, "exact", replace(GROUPED, **pieces), extras=EXTRAS)


FAULTS = (
    grouped(
        "every_group_reads_the_first",
        "the offset of a group's channels is left out",
        reads=lambda op, group: own(op, 0),
    ),
    grouped(
        "channels_are_dealt_out",
        "channel c belongs to group c % G, as if groups were interleaved",
        reads=lambda op, group: group + op.groups * np.arange(op.group_channels),
    ),
    grouped(
        "offset_by_outputs",
        "a group's channels begin at its first output's number",
        reads=lambda op, group: (
            (group * (op.out_channels // op.groups) + np.arange(op.group_channels)) % op.in_channels
        ),
    ),
    grouped(
        "dilation_ignored",
        "taps are read one pixel apart",
        conv=CONV,
    ),
    grouped(
        "swapped_dilation",
        "the vertical dilation is used for columns and the other way round",
        conv=replace(
            CONV,
            row=lambda op, i, r, h: i * op.stride[0] - op.padding[0] + r * op.dilation[1],
            column=lambda op, j, s, w: j * op.stride[1] - op.padding[1] + s * op.dilation[0],
        ),
    ),
    grouped(
        "dilated_padding",
        "the padding is multiplied by the dilation too",
        conv=replace(
            CONV,
            row=lambda op, i, r, h: i * op.stride[0] + (r - op.padding[0]) * op.dilation[0],
            column=column,
        ),
    ),
)
TWINS = (kernel("twin", Conv2d, "by_group", GROUPED, extras=EXTRAS),)
