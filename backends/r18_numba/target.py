"""Where the CUDA kernels run: on a GPU, or in Numba's simulator.

Numba chooses once, when `numba.cuda` is imported. So only `numba_cuda` imports it, after looking
for a GPU, and all other modules call `numba_cuda`.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from importlib import import_module
from typing import Any

from r18.errors import BackendUnavailable

NAME = "numba"
INSTALL = "pip install 'r18[numba]', and for a GPU 'numba-cuda[cu13]'"
_DRIVERS = ("libcuda.so.1", "libcuda.dylib", "nvcuda.dll")


@cache
def gpu_count() -> int:
    """The number of GPUs that the CUDA driver reports; 0 without a driver. Contacts the device."""
    for name in _DRIVERS:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0


_decided: list[bool] = []


def simulated() -> bool:
    """Whether kernels run in the simulator: there is no GPU, or NUMBA_ENABLE_CUDASIM is set.

    Decides for the whole process. Raises `BackendUnavailable` if Numba is missing, or if
    `numba.cuda` was imported without its simulator and there is no GPU.
    """
    if not _decided:
        _decided[:] = [_decide()]
    return _decided[0]


def known_simulated() -> bool:
    """Whether this process has already chosen the simulator."""
    return _decided == [True]


def _decide() -> bool:
    try:
        config: Any = import_module("numba.core.config")
    except ImportError as error:
        raise BackendUnavailable(NAME, f"Numba does not import: {error}", INSTALL) from error
    if config.ENABLE_CUDASIM:
        return True
    if gpu_count():
        return False
    if "numba.cuda" in sys.modules:
        raise BackendUnavailable(
            NAME,
            "there is no GPU, and numba.cuda was imported before its simulator could be chosen",
            "Set NUMBA_ENABLE_CUDASIM=1 in the environment.",
        )
    # NOTE: setting NUMBA_ENABLE_CUDASIM is too late if Numba was imported before.
    config.ENABLE_CUDASIM = 1
    return True


@cache
def numba_cuda() -> Any:
    """`numba.cuda`, for the GPU or the simulator. Raises `BackendUnavailable`."""
    simulated()
    try:
        config: Any = import_module("numba.core.config")
        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a small problem has a small grid
        module = import_module("numba.cuda")
    except ImportError as error:
        raise BackendUnavailable(NAME, f"numba.cuda does not import: {error}", INSTALL) from error
    if getattr(module, "implementation", "") != "NVIDIA":
        raise BackendUnavailable(
            NAME, "this is Numba's own CUDA target, which is no longer maintained", INSTALL
        )
    return module
