"""Crossings: for each size at which a kernel says that it changes, problems one beyond it.

Drawn problems come near a kernel's `edges` on some axis, now and then; here every edge is crossed
on every axis, with all else small. And it is crossed on one axis while another is just full: work
that is cut along both is then handed out by the number of full tiles. Where several sizes decide
together, the kernel itself names a problem beyond: its
`extra_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from r18.backend import Kernel
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
)
from r18_oracle.generate.corners import small_enough
from r18_oracle.generate.problems import fitted, normalization, room_for, windows_for
from r18_oracle.generate.stems import Stems, square


def crossings(kernel: Kernel, max_elements: int, max_macs: int) -> tuple[Problem, ...]:
    """The kernel's edges, crossed on each axis; what it takes of them, and not larger than that.

    A problem that the kernel refuses is rounded up to one that it takes, where there is one. Two
    axes at an edge may make a tensor twice as large. The kernel's own extra problems come
    last, at any size.
    """
    found = _crossed(kernel, kernel.edges, *room_for(kernel, max_elements, max_macs))
    return (*found, *(extra for extra in kernel.extra_problems if extra not in found))


def _crossed(
    kernel: Kernel, edges: Iterable[int], max_elements: int, max_macs: int
) -> tuple[Problem, ...]:
    every = (problem for edge in edges for problem in _BY_OP[kernel.op](kernel, edge + 1))
    near = (fitted(kernel, problem, max_macs) for problem in every)
    return tuple(dict.fromkeys(small_enough(near, 2 * max_elements, max_macs)))


LONG = 1_100
"""Channels of a sum that is cut into parts, however many there are, of several steps each."""


def choice_crossings(
    choice: Kernel, common: Container[int], max_elements: int, max_macs: int
) -> tuple[Problem, ...]:
    """Those of a choice's largest edge, and of its edges that are not common to all choices of its
    kernel. Of a convolution besides products: one beyond its largest edges in rows and in columns,
    and one of long sums."""
    own = [edge for edge in choice.edges if edge not in common or edge == max(choice.edges)]
    if choice.op is ConvMaxPool:  # few are small: images that fill a row of a tile
        return _crossed(choice, own, 2 * max_elements, 4 * max_macs)
    near = _crossed(choice, own, *room_for(choice, max_elements, max_macs))
    if choice.op is not Conv2d:
        return near
    beyond = (_product(edge + 1, edge + 1, 3) for edge in sorted(choice.edges)[-2:])
    fitting = (fitted(choice, p, 4 * max_macs) for p in (*beyond, _product(9, 27, LONG)))
    large = small_enough(fitting, 20 * max_elements, 4 * max_macs)
    return tuple(dict.fromkeys((*near, *large)))


def _product(rows: int, columns: int, depth: int) -> Problem:
    """A convolution that is a matrix product, of at least so many columns: images are narrow."""
    op = Conv2d(depth, rows, (1, 1), bias=True, residual=True, relu=True)
    height, width = -(-columns // 13), 13
    return Problem(op, ((1, depth, height, width), (1, rows, height, width)))


def _along(size: int, *base: int, full: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """The shape, with one extent after the other replaced by the size.

    full: two axes. One of them is then also one below the size, while the other has it.
    """
    for axis in range(len(base)):
        yield (*base[:axis], size, *base[axis + 1 :])
    for one, other in (full, full[::-1]):
        shape = [min(2, extent) for extent in base]
        shape[one], shape[other] = size - 1, size
        yield tuple(shape)


def _conv(kernel: Kernel, size: int) -> Iterator[Problem]:
    k, s, p = windows_for(kernel)[0]
    for n, c, o, oh, ow in _along(size, 2, 3, 2, 4, 3, full=(2, 4)):
        h, w = ((extent - 1) * s + max(1, k - 2 * p) for extent in (oh, ow))
        plain = Conv2d(c, o, (k, k), (s, s), (p, p))
        op = Conv2d(c, o, (k, k), (s, s), (p, p), bias=True, residual=True)
        yield Problem(op, ((n, c, h, w), plain.infer((n, c, h, w))))


def _conv_maxpool(kernel: Kernel, size: int) -> Iterator[Problem]:
    """Of the pooled output's extents, and of the convolution's."""
    of_conv, of_pool = Stems.of(kernel).windows[0]
    pool = MaxPool2d(*square(of_pool))
    for pooled in (True, False):
        for n, c, o, *made in _along(size, 2, 3, 2, 4, 3, full=(2, 4)):
            conv = Conv2d(c, o, *square(of_conv), bias=True)
            k, s, p = of_pool
            if pooled:
                made = [max(1, (extent - 1) * s + k - 2 * p) for extent in made]
            made = [max(extent, k - 2 * p) for extent in made]
            k, s, p = of_conv
            h, w = (max(1, (extent - 1) * s + k - 2 * p) for extent in made)
            yield Problem(ConvMaxPool(conv, pool), ((n, c, h, w),))


def _linear(kernel: Kernel, size: int) -> Iterator[Problem]:
    for n, k, o in _along(size, 2, 3, 2, full=(0, 2)):
        yield Problem(Linear(k, o), ((n, k),))


def _images(make: Callable[[tuple[int, ...]], Op]) -> Callable[[Kernel, int], Iterator[Problem]]:
    def along(kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in _along(size, 2, 2, 4, 3, full=(1, 3)):
            op = make(shape)
            yield Problem(op, (shape,) * op.arity)

    return along


def _flat(make: Callable[[], Op]) -> Callable[[Kernel, int], Iterator[Problem]]:
    def along(kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in (*_along(size, 2, 3, full=(0, 1)), (1, size)):
            op = make()
            yield Problem(op, (shape,) * op.arity)

    return along


_BY_OP: dict[type[Op], Callable[[Kernel, int], Iterator[Problem]]] = {
    Conv2d: _conv,
    BatchNorm: _images(lambda shape: BatchNorm(shape[1])),
    ReLU: _flat(ReLU),
    Add: _flat(Add),
    ConvMaxPool: _conv_maxpool,
    MaxPool2d: _images(lambda shape: MaxPool2d((2, 3), (1, 1), (1, 1))),
    GlobalAvgPool: _images(lambda shape: GlobalAvgPool()),
    Linear: _linear,
    Softmax: _flat(Softmax),
    Normalize: _images(lambda shape: normalization(shape[1])),
    Relayout: _images(lambda shape: Relayout(Layout.NCHW, Layout.NHWC)),
}
