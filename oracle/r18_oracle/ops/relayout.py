"""Relayout: the same tensor in another memory layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st

from r18.backend import Kernel
from r18.errors import UsageError
from r18.graph.ops import Layout, Problem, Relayout
from r18_oracle.generate.sizes import BEYOND_GRID, Sizes, along_images, images
from r18_oracle.ops.spec import OpSpec, Tensors

TO_NHWC = Relayout(Layout.NCHW, Layout.NHWC)
TO_NCHW = Relayout(Layout.NHWC, Layout.NCHW)


class RelayoutSpec(OpSpec[Relayout]):
    op = Relayout
    algorithms = ("exact",)
    indexed = True
    shuffles = True

    def reference(self, op: Relayout, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        return inputs[0].clone()

    def pytorch(self, op: Relayout, inputs: Tensors, weights: Tensors) -> torch.Tensor:
        raise UsageError(f"PyTorch's own network has no {op.label}")

    def draw(self, kernel: Kernel, most: int, macs: int) -> st.SearchStrategy[Problem]:
        return _problems(Sizes.of(kernel), most)

    def corners(self) -> Iterator[Problem]:
        for source in Layout:
            for target in Layout:  # including itself, which is a copy
                yield Problem(Relayout(source, target), ((2, 3, 5, 7),))

    def many(self) -> Iterator[Problem]:
        yield Problem(TO_NHWC, ((1, BEYOND_GRID, 1, 1),))
        yield Problem(TO_NCHW, ((BEYOND_GRID, 1, 1, 1),))

    def crossings(self, kernel: Kernel, size: int) -> Iterator[Problem]:
        for shape in along_images(size):
            yield Problem(TO_NHWC, (shape,))


@st.composite
def _problems(draw: st.DrawFn, sizes: Sizes, most: int) -> Problem:
    op = TO_NHWC if draw(st.booleans()) else TO_NCHW
    return Problem(op, (draw(images(sizes, most)),))


SPEC = RelayoutSpec()
