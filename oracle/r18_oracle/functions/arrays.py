"""The libraries whose arrays a function may take: views of buffers in, a result back.

A view shares its memory with the buffer, so that guard zones, fences and the comparison of inputs
apply to what the function does. One buffer has one view, as a caller's array has one identity: a
function that caches by the `id` of its argument gets the same object with other values in it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from r18.backend import Array, Buffer, DeviceInfo, Memory, Stream
from r18.backend.host import HostMemory, HostStream, host
from r18.cpu import cpu
from r18.errors import BackendUnavailable
from r18.graph.ops import Shape

POISONED = 4
"""Blocks that the allocator is given back before a call, filled with the output's contents."""
LARGE_NBYTES = 1 << 16
"""One more block, of repetitions of that: an allocator that aligns what it returns cuts it out of a
larger free block. Below the size from which the C library asks the system for new pages."""


class WrongResult(TypeError):
    """A function returned something that is not the result in its shape, format and library.

    Its text is a whole finding, such as `returned float64, expected …`: the function raised
    nothing.
    """


class Arrays(ABC):
    """One library on one device.

    name: as `--arrays` and `--device` name it. memory: where its buffers are.
    """

    name: str
    memory: Memory

    def __init__(self) -> None:
        self._views: WeakKeyDictionary[Any, dict[object, Any]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._last = threading.local()

    def view(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Any:
        """The leading bytes of a buffer as an array; the same object each time."""
        with self._lock:
            views = self._views.setdefault(buffer, {})
            key = shape, dtype
            if key not in views:
                views[key] = self._view(buffer, shape, dtype)
            return views[key]

    def keep(self, result: Any, output: Buffer, shape: Shape, dtype: np.dtype[Any]) -> None:
        """Copy a result into the output's buffer. Raises `WrongResult`."""
        if not self.owns(result):
            raise WrongResult(f"returned {_kind(result)}, expected {self.title} of shape {shape}")
        if tuple(result.shape) != shape:
            raise WrongResult(f"returned an array of shape {tuple(result.shape)}, expected {shape}")
        if (found := self.format_of(result)) != dtype.name:
            raise WrongResult(f"returned {found}, expected {dtype.name} as the input has")
        self._write(result, output, shape, dtype)

    def hold(self, result: Any, given: Sequence[Any]) -> None:
        """Hold a result until this thread has made the next call, as a caller may.

        given: the arrays of the call; a result in their memory is not held, as the checks write to
        it.
        """
        if not any(self.overlap(result, one) for one in given):
            self._last.one = result, self.contents(result)

    def check_held(self) -> None:
        """Raise `WrongResult` if the last call has overwritten the result that is held."""
        held, contents = getattr(self._last, "one", (None, None))
        self._last.one = None, None
        if held is not None and self.contents(held) != contents:
            raise WrongResult("overwrote the result of the call before, which its caller holds")

    def contents(self, result: Any) -> bytes | None:
        """The bytes of a result; None where reading them would take a copy from a device."""
        return None

    def overlap(self, one: Any, other: Any) -> bool:
        """Whether two arrays may be in the same memory."""
        return False

    @property
    @abstractmethod
    def title(self) -> str:
        """The library's name for an array, for messages."""

    @abstractmethod
    def device(self) -> DeviceInfo:
        """Contact the device. Raises `BackendUnavailable`."""

    @abstractmethod
    def stream(self) -> Stream: ...

    @abstractmethod
    def owns(self, value: object) -> bool:
        """Whether this is an array of the library on this device."""

    @abstractmethod
    def format_of(self, array: Any) -> str:
        """The name of its format, as NumPy has it."""

    @abstractmethod
    def poison(self, output: Buffer, nbytes: int) -> None:
        """Give the library's allocator some blocks that hold the bytes of the output.

        The next array of that size is likely to be one of them, so that elements which the function
        never writes keep the bytes that the output held before the call.
        """

    @abstractmethod
    def running(self, stream: Stream) -> AbstractContextManager[object]:
        """The context that a call runs in."""

    @abstractmethod
    def _view(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Any: ...

    @abstractmethod
    def _write(self, result: Any, output: Buffer, shape: Shape, dtype: np.dtype[Any]) -> None: ...


class NumPyArrays(Arrays):
    """NumPy's arrays."""

    name = "numpy"
    title = "a NumPy array"

    def __init__(self) -> None:
        super().__init__()
        self.memory = HostMemory()

    def device(self) -> DeviceInfo:
        return DeviceInfo("cpu", f"{cpu().name}, NumPy {np.__version__}")

    def stream(self) -> Stream:
        return HostStream()

    def owns(self, value: object) -> bool:
        return isinstance(value, np.ndarray | np.generic)

    def format_of(self, array: Any) -> str:
        return str(array.dtype)

    def poison(self, output: Buffer, nbytes: int) -> None:
        held = host(output).array[:nbytes]
        blocks = [np.resize(held, LARGE_NBYTES), *(held.copy() for _ in range(POISONED))]
        del blocks

    def running(self, stream: Stream) -> AbstractContextManager[object]:
        return _errors_ignored()

    def contents(self, result: Any) -> bytes | None:
        return bytes(np.asarray(result).tobytes())

    def overlap(self, one: Any, other: Any) -> bool:
        return np.may_share_memory(one, other)

    def _view(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Any:
        return host(buffer).as_array(shape, dtype)

    def _write(self, result: Any, output: Buffer, shape: Shape, dtype: np.dtype[Any]) -> None:
        host(output).as_array(shape, dtype)[...] = result


def _nothing(what: str, flag: int) -> None:
    """What NumPy calls for a floating-point error."""


@contextmanager
def _errors_ignored() -> Iterator[None]:
    """Floating-point errors do nothing, since NaN and Inf are values here (see `r18.backend`).

    NumPy calls a function for them rather than ignoring them, so that a function which sets what
    NumPy does has changed something whatever it sets. Its setting stays, for the checks to see.
    """
    errors, called = np.seterr(all="call"), np.seterrcall(_nothing)
    inside = np.geterr()
    try:
        yield
    finally:
        np.seterrcall(called)
        if np.geterr() == inside:
            np.seterr(**errors)


class TorchArrays(Arrays):
    """PyTorch's tensors in host memory."""

    name = "torch"
    title = "a tensor on the CPU"

    def __init__(self) -> None:
        super().__init__()
        self.memory = HostMemory()

    def device(self) -> DeviceInfo:
        return DeviceInfo("cpu", f"{cpu().name}, PyTorch {_torch().__version__}")

    def stream(self) -> Stream:
        return HostStream()

    def owns(self, value: object) -> bool:
        return isinstance(value, _torch().Tensor) and value.device.type == "cpu"

    def format_of(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def poison(self, output: Buffer, nbytes: int) -> None:
        held = host(output).array[:nbytes]
        tensor = _torch().from_numpy(held)
        blocks = [np.resize(held, LARGE_NBYTES), *(tensor.clone() for _ in range(POISONED))]
        del blocks

    def running(self, stream: Stream) -> AbstractContextManager[object]:
        without_gradients: AbstractContextManager[object] = _torch().no_grad()
        return without_gradients

    def contents(self, result: Any) -> bytes | None:
        plain = result.detach().contiguous().flatten().view(_torch().uint8)
        return bytes(plain.numpy().tobytes())

    def overlap(self, one: Any, other: Any) -> bool:
        first, second = (array.untyped_storage() for array in (one, other))
        return bool(
            first.data_ptr() < second.data_ptr() + second.nbytes()
            and second.data_ptr() < first.data_ptr() + first.nbytes()
        )

    def _view(self, buffer: Buffer, shape: Shape, dtype: np.dtype[Any]) -> Any:
        return _tensor(host(buffer).as_array(shape, dtype))

    def _write(self, result: Any, output: Buffer, shape: Shape, dtype: np.dtype[Any]) -> None:
        _tensor(host(output).as_array(shape, dtype)).copy_(result)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable("torch", str(error), "pip install torch") from None
    return torch


def _tensor(array: Array) -> Any:
    """The array's memory as a tensor; NumPy's bfloat16 is a format that PyTorch does not know."""
    torch = _torch()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _kind(value: object) -> str:
    if value is None:
        return "None (is a return missing?)"
    kind = type(value)
    where = getattr(value, "device", None)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" + (
        f" on {where}" if where is not None and kind.__module__.startswith("torch") else ""
    )


__all__ = ["Arrays", "NumPyArrays", "TorchArrays", "WrongResult"]
