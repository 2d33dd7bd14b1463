"""Tensor maps (TMA descriptors) of bytes: boxes of rows of 64 or of 128 bytes.

See `r18_cupy.cuda.tensor_map`, whose maps have rows of 128 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from r18_cupy.cuda import tensor_map
from r18_cupy.cuda.launch import Pointer
from r18_cupy.cuda.tensor_map import Im2colMap


@dataclass(frozen=True)
class ByteMap:
    """Boxes of a dense tensor of bytes. Loads outside of it return zeros; stores are dropped.

    extents: of the tensor, innermost first. box: likewise; its first is 64 or 128 bytes.
    """

    pointer: Pointer
    extents: tuple[int, ...]
    box: tuple[int, ...]

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The map for a tensor at this address, as an argument passed by value."""
        return _encoded(self, address)

    def encode(self, driver: Any, address: int) -> Any:
        pitches = [math.prod(self.extents[:axis]) for axis in range(1, len(self.extents))]
        return driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(self.extents),
            address,
            [driver.cuuint64_t(extent) for extent in self.extents],
            [driver.cuuint64_t(pitch) for pitch in pitches],
            [driver.cuuint32_t(extent) for extent in self.box],
            [driver.cuuint32_t(1) for _ in self.box],
            *_modes(driver, self.box[0]),
        )


@dataclass(frozen=True)
class ByteIm2colMap(Im2colMap):
    """`Im2colMap` of bytes. channels: of a box, 64 or 128."""

    channels: int = tensor_map.ROW_BYTES

    def at(self, address: int) -> np.ndarray[Any, Any]:
        return _encoded(self, address)

    def encode(self, driver: Any, address: int) -> Any:
        n, c, h, w = self.shape
        lower, upper = self.corners
        return driver.cuTensorMapEncodeIm2col(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            4,
            address,
            [driver.cuuint64_t(extent) for extent in (c, w, h, n)],
            [driver.cuuint64_t(pitch) for pitch in (c, w * c, h * w * c)],
            [lower[1], lower[0]],
            [upper[1], upper[0]],
            self.channels,
            self.run,
            [driver.cuuint32_t(step) for step in (1, self.stride[1], self.stride[0], 1)],
            *_modes(driver, self.channels),
        )


def _modes(driver: Any, row_nbytes: int) -> tuple[Any, Any, Any, Any]:
    swizzles = driver.CUtensorMapSwizzle
    return (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{row_nbytes}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def _encoded(found: ByteMap | ByteIm2colMap, address: int) -> np.ndarray[Any, Any]:
    return tensor_map._encoded(found, address)
