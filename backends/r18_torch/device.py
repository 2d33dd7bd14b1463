"""Memory and streams through PyTorch: byte tensors, CUDA streams, events and graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from r18.backend import Array, Buffer, Memory, Stream
from r18.graph.ops import Shape

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


class TorchBuffer:
    """A span of bytes in a 1-d uint8 tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()

    def view(self, offset: int, nbytes: int) -> TorchBuffer:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"view [{offset}, {offset + nbytes}) of a buffer of {self.nbytes}")
        return TorchBuffer(self.tensor[offset : offset + nbytes])

    def as_tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The leading bytes as a tensor that shares the memory."""
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        return self.tensor[:nbytes].view(dtype).view(shape)


class TorchMemory(Memory):
    """Bytes from PyTorch's caching allocator."""

    alignment = 256

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, nbytes: int) -> TorchBuffer:
        raw = torch.empty(nbytes + self.alignment, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % self.alignment
        return TorchBuffer(raw[start : start + nbytes])

    def upload(self, array: Array, buffer: Buffer) -> None:
        source = np.array(array, copy=True, order="C").reshape(-1).view(np.uint8)
        _torch(buffer).tensor[: source.nbytes].copy_(torch.from_numpy(source))

    def download(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        found = _torch(buffer).tensor[:nbytes].cpu().numpy()
        return found.view(dtype).reshape(shape).copy()

    def fill(self, buffer: Buffer, byte: int) -> None:
        _torch(buffer).tensor.fill_(byte)
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()


def _torch(buffer: Buffer) -> TorchBuffer:
    if not isinstance(buffer, TorchBuffer):
        raise TypeError(f"a PyTorch kernel was given a {type(buffer).__name__}")
    return buffer


class HostTime:
    """A reading of the monotonic clock."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def milliseconds_since(self, earlier: HostTime) -> float:
        return (self.seconds - earlier.seconds) * 1e3


class CudaTime:
    """A recorded CUDA event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def milliseconds_since(self, earlier: CudaTime) -> float:
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event))


class TorchStream(Stream):
    """A CUDA stream, or the CPU, where work runs when it is enqueued."""

    def __init__(self, device: str) -> None:
        self.cuda = None if device == "cpu" else torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        if self.cuda is not None:
            self.cuda.synchronize()

    def record(self) -> HostTime | CudaTime:
        return HostTime() if self.cuda is None else CudaTime(self.cuda)

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | None:
        if self.cuda is None:
            return None
        work()  # on their first call, libraries choose algorithms and allocate
        self.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.cuda):
            work()

        def launch() -> None:
            with torch.cuda.stream(self.cuda):
                graph.replay()

        return launch
