"""The host: what it is, how busy it is, and how much memory this process holds."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import r18


def machine() -> dict[str, Any]:
    """What a time was measured on, for a record: a time means nothing without it."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpus": cpus(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "r18": r18.__version__,
    }


def cpus() -> int:
    """The CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cache_folder() -> Path:
    """`R18_CACHE`, or `r18` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    if chosen := os.environ.get("R18_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "r18"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def resident_nbytes() -> int | None:
    """Bytes of this process in memory, after giving back what is free; None but on Linux."""
    _trim()
    return _status("VmRSS")


def reset_peak() -> bool:
    """Let `peak_nbytes` begin anew at what is resident now; False where the system cannot."""
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_nbytes() -> int | None:
    """The most bytes in memory since `reset_peak`, or since the process began."""
    return _status("VmHWM")


def _status(field: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def _trim() -> None:
    """Give freed heap back to the system: it must neither count, nor be reused uncounted."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # malloc_trim is glibc's
            ctypes.CDLL(None).malloc_trim(0)


__all__ = ["cpus", "machine", "peak_nbytes", "reset_peak", "resident_nbytes"]
