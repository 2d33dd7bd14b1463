"""Data derived from weights, kept between calls and derived again when the weights change.

PyTorch counts changes in place (`Tensor._version`), and a tensor that is replaced, moved or cast
has another address. NOTE: PyTorch does not count writes through `.data` or NumPy. On a CPU a few
elements of each tensor are compared as well, which shows every change of a whole tensor. On a GPU
the comparison would wait for the device, so users call `refresh`.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
import torch

from r18.backend import Backend, Buffer
from r18.torch.storage import forbid_capture, kept_span, on_device, wait

Tensors = Sequence[torch.Tensor]
Packed = tuple[tuple[Buffer, ...], ...]

KEPT = 8
"""How many derivations of the same weights are kept, one per input shape, least recently used first
out."""

_version = attrgetter("_version")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seen:
    """Tensors as they were when they were read.

    Their storages are held, so that no other tensor can take their addresses.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._held = [tensor.untyped_storage() for tensor in tensors]
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._versions = list(map(_version, tensors))
        self._spots = [spot for tensor in tensors for spot in _spots(tensor)]
        self._found = [view[index] for view, index in self._spots]

    def same(self, tensors: Tensors) -> bool:
        """Whether these are the same tensors, unchanged as far as can be told without a wait."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
            and list(map(_version, tensors)) == self._versions
            and [view[index] for view, index in self._spots] == self._found
        )


def _spots(tensor: torch.Tensor) -> list[tuple[memoryview, int]]:
    """Where the bits of the first, middle and last element of a CPU's tensor are to be read."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return []
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((extent,), (1,)).view(_BITS[tensor.element_size()])
    view = memoryview(flat.numpy())
    return [(view, index) for index in sorted({0, extent // 2, extent - 1})]


class Prepared:
    """Packed weights in PyTorch's memory, rewritten where they are when the weights change.

    pack: from the tensors to buffers of one's own, step by step.
    """

    def __init__(
        self,
        backend: Backend,
        device: torch.device,
        pack: Callable[[Tensors], Packed],
        tensors: Tensors,
    ) -> None:
        self._backend = backend
        self._pack = pack
        self.device = device
        self.shapes = [tensor.shape for tensor in tensors]
        self._seen = Seen(
            tensors
        )  # before reading them: a change during the read is seen next time
        with on_device(device):
            self.packed = self._make(tensors)

    def follows(self, tensors: Tensors) -> bool:
        """Whether the packed weights are those of the tensors, as far as can be told."""
        return self._seen.same(tensors)

    def follow(self, tensors: Tensors) -> None:
        """Make the packed weights those of the tensors, if they are not."""
        if not self.follows(tensors):
            self.rewrite(tensors)

    def rewrite(self, tensors: Tensors) -> None:
        """Make the packed weights those of the tensors; their addresses stay, for graphs."""
        seen = Seen(tensors)
        memory = self._backend.memory
        with on_device(self.device):
            packed = self._make(tensors)
            wait(self.device)  # runs under way read what is to be written over
            for olds, news in zip(self.packed, packed, strict=True):
                for old, new in zip(olds, news, strict=True):
                    memory.upload(memory.download(new, (new.nbytes,), np.dtype(np.uint8)), old)
        self._seen = seen

    def _make(self, tensors: Tensors) -> Packed:
        forbid_capture(self.device, "reading the model's weights")
        memory = self._backend.memory
        with memory.allocating(lambda nbytes: kept_span(nbytes, self.device)):
            return self._pack(tensors)


class Derived:
    """Something that runs on packed weights.

    captured: a CUDA graph of the user's may read them: they are kept, whatever happens.
    """

    prepared: Prepared
    captured: bool = False


D = TypeVar("D", bound=Derived)
_HANDLES = itertools.count(1)
_ALL: WeakValueDictionary[int, Followed] = WeakValueDictionary()


class Followed:
    """Everything that is derived from one set of weights; lives as long as its owner keeps it."""

    def __init__(self) -> None:
        self.handle = next(_HANDLES)
        self._lock = threading.RLock()
        self._derived: OrderedDict[Hashable, Derived] = OrderedDict()
        _ALL[self.handle] = self

    def current(self, key: Hashable, tensors: Tensors) -> Derived | None:
        """The value derived for that key, if the tensors are still those that it is derived from.

        This is on the way of every call, and all that has to be looked at again each time.
        """
        with self._lock:
            found = self._derived.get(key)
            if found is None or not found.prepared.follows(tensors):
                return None
            self._derived.move_to_end(key)
            return found

    def find(self, key: Hashable, tensors: Tensors, make: Callable[[], D]) -> D:
        """The value that `make` made for that key, brought up to date with the tensors."""
        with self._lock:
            found = self._derived.get(key)
            if found is None:
                found = self._derived[key] = make()
                self._forget_oldest()
            else:
                self._derived.move_to_end(key)
                found.prepared.follow(tensors)
            return cast(D, found)

    def refresh(self, tensors: Tensors) -> None:
        """Read the weights again, whether a change was seen or not."""
        shapes = [tensor.shape for tensor in tensors]
        with self._lock:
            for key, derived in list(self._derived.items()):
                prepared = derived.prepared
                if (prepared.device, prepared.shapes) == (tensors[0].device, shapes):
                    prepared.rewrite(tensors)
                elif not derived.captured:
                    del self._derived[key]

    def _forget_oldest(self) -> None:
        idle = [key for key, derived in self._derived.items() if not derived.captured]
        for key in idle[: max(0, len(idle) - KEPT)]:
            del self._derived[key]


ORPHANS = 8
"""How many caches without an owner are kept, least recently used first out."""

_ORPHANS: OrderedDict[int, Followed] = OrderedDict()
_ORPHANED = threading.Lock()


def followed(handle: int) -> Followed:
    """The cache of that handle; a new and empty one for 0.

    NOTE: an exported program holds the handle of a drop-in that may be gone, or was in another
    process. Without a cache it would plan and pack in each call. A handle that is another's here
    costs time and is not wrong: what is kept is compared with the weights that a call gives.
    """
    found = _ALL.get(handle)
    if found is not None or not handle:
        return found or Followed()
    with _ORPHANED:
        if handle not in _ORPHANS:
            _ORPHANS[handle] = Followed()
        found = _ORPHANS[handle]
        _ORPHANS.move_to_end(handle)
        while len(_ORPHANS) > ORPHANS:
            _ORPHANS.popitem(last=False)
    return found
