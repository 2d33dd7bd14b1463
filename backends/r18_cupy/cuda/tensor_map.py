"""Tensor maps (TMA descriptors) as data.

A map contains the tensor's address, so it is encoded when a launch is bound to its buffers. CUDA
Driver API, "Tensor Map Object Management": `cuTensorMapEncodeTiled`, `cuTensorMapEncodeIm2col`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from r18.errors import R18Error
from r18.graph.precision import dtype_of
from r18_cupy.cuda.launch import Pointer

NBYTES = 128  # of an encoded map
ROW_BYTES = 128  # of a box in shared memory: the span of the 128-byte swizzle

# Limits of the encoding.
MAX_BOX = 256  # elements of a box along one extent; pixels in im2col mode may be more
MAX_STRIDE = 8  # from one pixel to the next in im2col mode
CORNERS = range(-128, 128)  # pixel box corners, relative to the image's
MAX_OFFSET = 255  # of a position in the window


class TensorMapError(R18Error):
    """The driver does not encode a tensor map."""


@dataclass(frozen=True)
class MatrixMap:
    """Boxes of a row-major matrix, or of a batch of contiguous ones.

    Loads past a matrix's last row or column return zeros; stores there are dropped.

    dtype:    a storage format's name, as `Precision.storage`.
    box_rows: rows of a box; its columns are 128 bytes.
    matrices: the batch; None for a single matrix, whose boxes have two coordinates.
    """

    pointer: Pointer
    dtype: str
    rows: int
    columns: int
    box_rows: int
    matrices: int | None = None

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The map for a matrix at this address, as an argument passed by value."""
        return _encoded(self, address)

    def encode(self, driver: Any, address: int) -> Any:
        size = dtype_of(self.dtype).itemsize
        more = () if self.matrices is None else (self.matrices,)
        pitches = (self.columns * size, self.rows * self.columns * size)
        return driver.cuTensorMapEncodeTiled(
            _data_type(driver, self.dtype),
            2 + len(more),
            address,
            _integers(driver.cuuint64_t, self.columns, self.rows, *more),
            _integers(driver.cuuint64_t, *pitches[: 1 + len(more)]),
            _integers(driver.cuuint32_t, ROW_BYTES // size, self.box_rows, *(1 for _ in more)),
            _integers(driver.cuuint32_t, 1, 1, *(1 for _ in more)),
            *_modes(driver),
        )


@dataclass(frozen=True)
class PatchMap:
    """Boxes of pixels of an NHWC tensor (tiled mode), zeros outside of its images.

    shape: logical, (N, C, H, W).
    height, width: pixels of a box; its channels are 128 bytes.
    """

    pointer: Pointer
    dtype: str
    shape: tuple[int, int, int, int]
    height: int
    width: int

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The map for a tensor at this address, as an argument passed by value."""
        return _encoded(self, address)

    def encode(self, driver: Any, address: int) -> Any:
        size = dtype_of(self.dtype).itemsize
        n, c, h, w = self.shape
        return driver.cuTensorMapEncodeTiled(
            _data_type(driver, self.dtype),
            4,
            address,
            _integers(driver.cuuint64_t, c, w, h, n),
            _integers(driver.cuuint64_t, c * size, w * c * size, h * w * c * size),
            _integers(driver.cuuint32_t, ROW_BYTES // size, self.width, self.height, 1),
            _integers(driver.cuuint32_t, 1, 1, 1, 1),
            *_modes(driver),
        )


@dataclass(frozen=True)
class Im2colMap:
    """TMA's im2col mode over an NHWC tensor: one window position of a run of output pixels.

    shape:  logical, (N, C, H, W).
    window: the convolution's kernel size; stride and padding likewise.
    run:    pixels of a box; its channels are 128 bytes.
    """

    pointer: Pointer
    dtype: str
    shape: tuple[int, int, int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    run: int

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """The map for a tensor at this address, as an argument passed by value."""
        return _encoded(self, address)

    @property
    def corners(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The bounding box of window origins: its first pixel, and its last pixel relative to the
        image's last pixel; each (height, width).
        """
        lower = (-self.padding[0], -self.padding[1])
        upper = (
            self.padding[0] - (self.window[0] - 1),
            self.padding[1] - (self.window[1] - 1),
        )
        return lower, upper

    def refusal(self) -> str | None:
        """Why the encoding cannot represent the map, or None."""
        if max(self.stride) > MAX_STRIDE:
            return f"strides of at most {MAX_STRIDE}, got {self.stride}"
        if max(self.window) - 1 > MAX_OFFSET:
            return f"windows of at most {MAX_OFFSET + 1}, got {self.window}"
        if any(place not in CORNERS for corner in self.corners for place in corner):
            return f"padding and window within {CORNERS.stop}, got {self.padding}, {self.window}"
        size = dtype_of(self.dtype).itemsize
        if self.shape[1] * size % 16:
            return f"pixels of whole 16 bytes, got {self.shape[1]} channels"
        return None

    def encode(self, driver: Any, address: int) -> Any:
        size = dtype_of(self.dtype).itemsize
        n, c, h, w = self.shape
        lower, upper = self.corners
        return driver.cuTensorMapEncodeIm2col(
            _data_type(driver, self.dtype),
            4,
            address,
            _integers(driver.cuuint64_t, c, w, h, n),
            _integers(driver.cuuint64_t, c * size, w * c * size, h * w * c * size),
            [lower[1], lower[0]],
            [upper[1], upper[0]],
            ROW_BYTES // size,
            self.run,
            _integers(driver.cuuint32_t, 1, self.stride[1], self.stride[0], 1),
            *_modes(driver),
        )


def _data_type(driver: Any, dtype: str) -> Any:
    kinds = driver.CUtensorMapDataType
    return getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}")


def _integers(kind: Any, *values: int) -> list[Any]:
    return [kind(value) for value in values]


def _modes(driver: Any) -> tuple[Any, Any, Any, Any]:
    return (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


@lru_cache(maxsize=4096)
def _encoded(tensor_map: MatrixMap | PatchMap | Im2colMap, address: int) -> np.ndarray[Any, Any]:
    from cuda.bindings import driver

    status, encoded = tensor_map.encode(driver, address)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise TensorMapError(f"{status.name} from encoding {tensor_map} at address {address:#x}")
    opaque = ctypes.string_at(encoded.getPtr(), NBYTES)
    return np.frombuffer(opaque, np.dtype((np.void, NBYTES)))
