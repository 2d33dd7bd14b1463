"""Windows of convolutions that are pooled, for tests of kernels that fuse the two."""

from __future__ import annotations

from r18.graph.ops import MaxPool2d

POOLS = (
    MaxPool2d((3, 3), (2, 2), (1, 1)),
    MaxPool2d((2, 2), (2, 2)),
    MaxPool2d((5, 3), (1, 2), (2, 0)),
    MaxPool2d((1, 1), (3, 3)),
    MaxPool2d((4, 4), (3, 1), (2, 2)),
)
"""Pooling windows that share rows, that do not, and that skip rows."""

WINDOWS = ((3, 1, 1), (7, 2, 3), (1, 2, 0), (2, 1, 0))
"""Size, stride and padding of a convolution."""
