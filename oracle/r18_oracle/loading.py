"""Backends and kernels by name, as a worker process gets them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from r18.backend import Backend, Kernel
from r18.backend.registry import load_backend
from r18.errors import unknown
from r18_oracle.functions.target import backend_of, is_target


@cache
def loaded_backend(name: str) -> Backend:
    """The probed backend with this name; loaded once per process.

    name: as `load_backend` takes it, or the name of a target of `r18 check`.
    """
    backend = backend_of(name) if is_target(name) else load_backend(name)
    backend.probe()
    return backend


def kernel_of(backend: Backend, kernel_id: str) -> Kernel:
    """The backend's kernel with this id; raises `UnknownName` with the nearest match."""
    for kernel in backend.kernels():
        if kernel.id == kernel_id:
            return kernel
    raise unknown("kernel", kernel_id, (k.id for k in backend.kernels()))


def with_choices(backend: Backend, kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Each of these kernels, followed by its choices."""
    for kernel in kernels:
        yield kernel
        yield from backend.variants(kernel)


def planned_kernels(backend: Backend) -> dict[str, Kernel]:
    """The kernels that a plan may name, by id: those that the backend lists, and their choices."""
    return {kernel.id: kernel for kernel in with_choices(backend, backend.kernels())}
