"""Windows of convolutions and poolings: sizes, inputs that give wanted outputs, shrinking."""

from __future__ import annotations

from hypothesis import strategies as st

from r18.graph.ops import Conv2d, MaxPool2d, Shape
from r18_oracle.ops.spec import Numbers

Pair = tuple[int, int]
Window = tuple[int, int, int]
"""Kernel size, stride and padding of a square window."""


def square(window: Window) -> tuple[Pair, Pair, Pair]:
    """Kernel size, stride and padding along both axes, as ops take them."""
    k, s, p = window
    return (k, k), (s, s), (p, p)


@st.composite
def source(draw: st.DrawFn, wanted: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Height and width of an image that gives the wanted outputs, with some pixels left over."""
    found = []
    for out, k, s, p in zip(wanted, kernel, stride, padding, strict=True):
        slack = draw(st.integers(0, s - 1))
        found.append(max(1, k - 2 * p, (out - 1) * s + k - 2 * p + slack))
    return found[0], found[1]


def numbers_of(op: Conv2d | MaxPool2d) -> Numbers:
    """Kernel size, stride and padding by name and axis, for shrinking."""
    return {
        f"{name}_{axis}": extent
        for name in ("kernel_size", "stride", "padding")
        for axis, extent in zip("hw", getattr(op, name), strict=True)
    }


def window_of(numbers: Numbers, prefix: str = "") -> tuple[Pair, Pair, Pair]:
    """Kernel size, stride and padding, from names that `numbers_of` gives, after a prefix."""

    def pair(name: str) -> Pair:
        return numbers[f"{prefix}{name}_h"], numbers[f"{prefix}{name}_w"]

    return pair("kernel_size"), pair("stride"), pair("padding")


def pixel(op: Conv2d | MaxPool2d, image: Shape, output: Pair, tap: Pair) -> Pair:
    """Row and column under a tap of an output's window.

    For a tap in the padding it is the nearest pixel, which must not be read through that tap.
    """
    row, column = (
        min(max(at * s - p + t, 0), extent - 1)
        for at, s, p, t, extent in zip(output, op.stride, op.padding, tap, image[2:], strict=True)
    )
    return row, column
