"""PyTorch's tensors and CuPy's arrays on a CUDA device.

The buffers of a call are parts of one allocation of the library itself. A call runs in the default
stream, as a caller's does who names none: many functions launch there whatever stream is current. A
function that launches elsewhere and does not wait is seen by the checks `completion` and `exact`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from r18.backend import Array, Buffer, DeviceInfo, Memory, Stream
from r18.errors import BackendUnavailable
from r18.graph.ops import Shape
from r18_oracle.functions.arrays import POISONED, Arrays


class DeviceBuffer:
    """A span of bytes: `bytes` is an array of uint8 of the library."""

    def __init__(self, bytes: Any) -> None:
        self.bytes = bytes

    @property
    def nbytes(self) -> int:
        return int(self.bytes.shape[0])

    def view(self, offset: int, nbytes: int) -> DeviceBuffer:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"view [{offset}, {offset + nbytes}) of a buffer of {self.nbytes}")
        return DeviceBuffer(self.bytes[offset : offset + nbytes])


def _bytes(buffer: Buffer) -> Any:
    if not isinstance(buffer, DeviceBuffer):
        raise TypeError(f"a function on a device was given a {type(buffer).__name__}")
    return buffer.bytes


# -- PyTorch -------------------------------------------------------------------------------------


class TorchMemory(Memory):
    """Bytes from PyTorch's caching allocator, on any of its devices."""

    alignment = 256

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, nbytes: int) -> DeviceBuffer:
        import torch

        raw = torch.empty(nbytes + self.alignment, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % self.alignment
        return DeviceBuffer(raw[start : start + nbytes])

    def upload(self, array: Array, buffer: Buffer) -> None:
        import torch

        source = np.array(array, copy=True, order="C").reshape(-1).view(np.uint8)
        _bytes(buffer)[: source.nbytes].copy_(torch.from_numpy(source))

    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        found: Array = _bytes(buffer)[:nbytes].cpu().numpy()
        return found.view(dtype).reshape(shape).copy()

    def fill(self, buffer: Buffer, byte: int) -> None:
        _bytes(buffer).fill_(byte)
        self._wait()

    def _wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()


class TorchStream(Stream):
    """The default stream of PyTorch's device."""

    def __init__(self) -> None:
        import torch

        self.cuda: Any = torch.cuda.default_stream()

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def record(self) -> Any:
        raise NotImplementedError("a function that is checked is not timed")


class TorchCudaArrays(Arrays):
    """PyTorch's tensors on the current CUDA device."""

    name = "torch-cuda"
    title = "a tensor on the GPU"

    def __init__(self) -> None:
        super().__init__()
        self.memory = TorchMemory("cuda")

    def device(self) -> DeviceInfo:
        try:
            import torch
        except ImportError as error:
            raise BackendUnavailable(self.name, str(error), "pip install torch") from None
        if not torch.cuda.is_available():
            raise BackendUnavailable(
                self.name, "PyTorch finds no CUDA device", "Use --arrays torch."
            )
        name = torch.cuda.get_device_name()
        return DeviceInfo("cuda", f"{name}, PyTorch {torch.__version__}")

    def stream(self) -> Stream:
        return TorchStream()

    def owns(self, value: object) -> bool:
        import torch

        return isinstance(value, torch.Tensor) and value.device.type == "cuda"

    def format_of(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def poison(self, output: Buffer, nbytes: int) -> None:
        blocks = [_bytes(output)[:nbytes].clone() for _ in range(POISONED)]
        del blocks

    def running(self, stream: Stream) -> AbstractContextManager[object]:
        import torch

        inside = ExitStack()
        inside.enter_context(torch.no_grad())
        if isinstance(stream, TorchStream):
            inside.enter_context(torch.cuda.stream(stream.cuda))
        return inside

    def _view(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Any:
        import torch

        nbytes = math.prod(shape) * dtype.itemsize
        return _bytes(buffer)[:nbytes].view(getattr(torch, dtype.name)).view(shape)

    def _write(self, result: Any, output: Buffer, shape: Shape, dtype: np.dtype[Any]) -> None:
        self._view(output, shape, dtype).copy_(result)


# -- CuPy ----------------------------------------------------------------------------------------


class CuPyMemory(Memory):
    """Bytes from CuPy's pool."""

    alignment = 256

    def empty(self, nbytes: int) -> DeviceBuffer:
        import cupy

        raw = cupy.empty(nbytes + self.alignment, cupy.uint8)
        start = -raw.data.ptr % self.alignment
        return DeviceBuffer(raw[start : start + nbytes])

    def upload(self, array: Array, buffer: Buffer) -> None:
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _bytes(buffer)[: source.nbytes].set(source)
        _wait_for_all()

    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        found: Array = _bytes(buffer)[:nbytes].get()
        return found.view(dtype).reshape(shape)

    def fill(self, buffer: Buffer, byte: int) -> None:
        _bytes(buffer).fill(byte)
        _wait_for_all()


def _wait_for_all() -> None:
    import cupy

    cupy.cuda.get_current_stream().synchronize()


class CuPyStream(Stream):
    """The default stream of CuPy's device."""

    def __init__(self) -> None:
        import cupy

        self.cuda = cupy.cuda.Stream.null

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def record(self) -> Any:
        raise NotImplementedError("a function that is checked is not timed")


class CuPyArrays(Arrays):
    """CuPy's arrays on the current device; it has no bfloat16."""

    name = "cupy"
    title = "a CuPy array"

    def __init__(self) -> None:
        super().__init__()
        self.memory = CuPyMemory()

    def device(self) -> DeviceInfo:
        try:
            import cupy
        except ImportError as error:
            remedy = "pip install 'r18[cuda13]' (or 'r18[cuda12]' for a driver of CUDA 12)"
            raise BackendUnavailable(self.name, str(error), remedy) from None
        try:
            name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
        except Exception as error:  # of CuPy's or the driver's
            raise BackendUnavailable(self.name, str(error), "Use --arrays numpy.") from None
        return DeviceInfo("cuda", f"{name}, CuPy {cupy.__version__}")

    def stream(self) -> Stream:
        return CuPyStream()

    def owns(self, value: object) -> bool:
        import cupy

        return isinstance(value, cupy.ndarray)

    def format_of(self, array: Any) -> str:
        return str(array.dtype)

    def poison(self, output: Buffer, nbytes: int) -> None:
        blocks = [_bytes(output)[:nbytes].copy() for _ in range(POISONED)]
        del blocks

    def running(self, stream: Stream) -> AbstractContextManager[object]:
        inside = ExitStack()
        if isinstance(stream, CuPyStream):
            inside.enter_context(stream.cuda)
        return inside

    def _view(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Any:
        nbytes = math.prod(shape) * dtype.itemsize
        return _bytes(buffer)[:nbytes].view(dtype).reshape(shape)

    def _write(self, result: Any, output: Buffer, shape: Shape, dtype: np.dtype[Any]) -> None:
        self._view(output, shape, dtype)[...] = result


__all__ = ["CuPyArrays", "DeviceBuffer", "TorchCudaArrays", "TorchMemory"]
