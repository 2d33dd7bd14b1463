"""The host: its description, its load, and the threads and memory that this process uses."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from threadpoolctl import LibController, threadpool_limits

from r18.cpu import cpu, threads
from r18.errors import UsageError

THREADS = "OMP_NUM_THREADS"
"""The variable that says how many threads CPU work may use: most libraries read it."""
OTHER_THREADS = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""The same for libraries that read a variable of their own."""
NUMBA_THREADS = "NUMBA_NUM_THREADS"
BUSY = 0.3
"""The load per CPU above which other processes disturb a measurement."""
CUDA_DRIVERS = ("libcuda.so.1", "libcuda.dylib", "nvcuda.dll")
"""The libraries of NVIDIA's driver, by system."""
CGROUP = Path("/sys/fs/cgroup")
"""The folder in which Linux states a container's limits."""

KEPT_NBYTES = 256 << 20
MOST_REUSED_NBYTES = 32 << 20
"""The largest array whose memory is reused; glibc takes no larger number."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def machine() -> dict[str, Any]:
    """The machine, for a record of a time: a time means nothing without it."""
    here = cpu()
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": here.name,
        "cpus": here.threads,
        "cpu": here.to_json(),
        "threads": thread_count(),
        "load_average": list(psutil.getloadavg()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "r18": package_version("r18"),
    }


def cpus() -> int:
    """The CPUs that this process may use."""
    return len(threads())


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed arrays instead of returning it to the system each time.

    A new array then needs no new pages, whose first use costs more than computing its elements. Up
    to `KEPT_NBYTES` stay with the process. Nothing happens with another C library, and where the
    user has set one of glibc's variables, such as MALLOC_TRIM_THRESHOLD_.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with suppress(AttributeError):  # musl has no `mallopt`
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, MOST_REUSED_NBYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_NBYTES)


def disturbances(host: Mapping[str, Any]) -> list[str]:
    """Why times that are measured on this `machine()` may be too long, in words."""
    found, here = [], f"{host['cpus']} CPU{'s' * (host['cpus'] != 1)}"
    load = host["load_average"]
    if load is not None and load[0] > BUSY * host["cpus"]:
        found.append(
            f"the machine is busy, its load average of the last minute is {load[0]:.1f} on {here}: "
            "times come out too long; measure again when it is idle"
        )
    if host["threads"] > host["cpus"]:
        found.append(
            f"{host['threads']} threads on {here} wait for each other: give --threads "
            f"{host['cpus']}, or set {THREADS}"
        )
    return found


def crowding(host: Mapping[str, Any]) -> list[str]:
    """How the threads of CPU work share cores and memory on this `machine()`, in words.

    Nothing where each has a core and all have one memory, and in records older than these facts.
    """
    facts, count, found = host.get("cpu") or {}, host["threads"], []
    cores, nodes = facts.get("cores", 0), facts.get("nodes", 0)
    if 0 < cores < count <= host["cpus"]:
        found.append(
            f"{count} threads on {cores} core{'s' * (cores != 1)}: two threads of a core share its "
            f"vector units and caches, so compare with --threads {cores}"
        )
    if nodes > 1:
        found.append(
            f"threads run on {nodes} NUMA nodes, each with memory of its own: times depend on "
            "where memory is; keep to one node, as with numactl --cpunodebind=0 --membind=0"
        )
    return found


def thread_count() -> int:
    """The threads that CPU work may use: `OMP_NUM_THREADS`, else the CPUs of this process."""
    first = os.environ.get(THREADS, "").partition(",")[0].strip()  # then those of inner levels
    return int(first) if first.isdecimal() and int(first) else cpus()


def set_threads(count: int) -> None:
    """Let CPU work use `count` threads, in whatever library and for the rest of this process.

    Libraries and backends that are loaded later, and new processes, read the environment variables
    that this sets. Libraries that are loaded already (BLAS, OpenMP, PyTorch, Numba) are set through
    their own interfaces. Call it before backends are used: they may keep the first count they see.

    Raises `UsageError` for a count below 1, and for one above what a loaded Numba started with.
    """
    if count < 1:
        raise UsageError(f"work needs at least 1 thread, got {count}")
    numba, torch = sys.modules.get("numba"), sys.modules.get("torch")
    if numba is not None:
        most = numba.config.NUMBA_NUM_THREADS
        if count > most:
            raise UsageError(
                f"Numba was loaded with {most} threads and cannot have {count}\n"
                f"  set {NUMBA_THREADS}={count} before Python starts"
            )
        numba.set_num_threads(count)
    else:  # once loaded, Numba refuses another value of it
        os.environ[NUMBA_THREADS] = str(count)
    for name in (THREADS, *OTHER_THREADS):
        os.environ[name] = str(count)
    threadpool_limits(count)
    if torch is not None:
        torch.set_num_threads(count)


def has_cuda_driver() -> bool:
    """Whether NVIDIA's driver can be loaded. Contacts no device."""
    for name in CUDA_DRIVERS:
        with suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def set_blas_threads(library: LibController, count: int) -> None:
    """The threads of a BLAS library's products, from whichever thread this is called.

    NOTE: from 3.8 on, threadpoolctl lets only the first thread that has set OpenBLAS's count set it
    again, and ignores the others silently. Forgetting that thread, before and after, avoids it.
    """
    forget = getattr(library, "clear_controlling_thread", None)
    if forget is not None:
        forget(force=True)
    library.set_num_threads(count)
    if forget is not None:
        forget(force=True)


def cache_folder() -> Path:
    """`R18_CACHE`, or `r18` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    if chosen := os.environ.get("R18_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "r18"


@contextmanager
def caching_in(folder: Path) -> Iterator[None]:
    """Let this folder be `cache_folder()` within the context, also for processes started there."""
    before = os.environ.get("R18_CACHE")
    os.environ["R18_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["R18_CACHE"]
        else:
            os.environ["R18_CACHE"] = before


def package_version(package: str) -> str | None:
    """The version of an installed distribution, by its name; None for one that is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def resident_nbytes() -> int:
    """Bytes of this process in memory, after giving free heap back to the system."""
    _trim()
    return int(psutil.Process().memory_info().rss)


def memory_nbytes() -> int:
    """Bytes of memory of this machine, or of its container if that has fewer."""
    limits = [int(psutil.virtual_memory().total)]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups 2, and 1
        with suppress(OSError, ValueError):  # 'max' is no limit
            limits.append(int((CGROUP / name).read_text()))
    return min(limits)


def reset_peak() -> bool:
    """Reset `peak_nbytes` to the resident bytes now; False where the system cannot."""
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_nbytes() -> int | None:
    """The most bytes in memory since `reset_peak`, or since the process began; Linux, else None.

    psutil knows no peak that can be reset.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _trim() -> None:
    """Give freed heap back to the system, so that it is neither counted nor reused uncounted."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # malloc_trim is glibc's
            ctypes.CDLL(None).malloc_trim(0)


__all__ = [
    "CUDA_DRIVERS",
    "cache_folder",
    "cpus",
    "crowding",
    "disturbances",
    "has_cuda_driver",
    "machine",
    "memory_nbytes",
    "package_version",
    "peak_nbytes",
    "reset_peak",
    "resident_nbytes",
    "set_blas_threads",
    "set_threads",
    "thread_count",
]
