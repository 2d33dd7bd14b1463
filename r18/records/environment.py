"""A run's environment apart from our own sources: device, driver, Python and packages."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

from r18.backend import DeviceInfo
from r18.cpu import cpu
from r18.machine import package_version

PACKAGES = (
    "r18",
    "numpy",
    "scipy",
    "torch",
    "torchvision",
    "triton",
    "numba",
    "numba-cuda",
    "onnx",
    "onnxruntime",
    "openvino",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "hypothesis",
)
"""Packages whose version can change a result or a time."""


def environment(device: DeviceInfo) -> dict[str, Any]:
    """The device, the versions of installed packages and, for CUDA, the driver.

    Plain data of the type `r18.records.kinds.Environment`.
    """
    # NOTE: plain strings. PyTorch's version is of a subclass of str, which no record takes.
    details = {name: str(value) for name, value in device.details.items()}
    found: dict[str, Any] = {
        "device": {"kind": device.kind, "name": device.name, **details},
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: known for name in PACKAGES if (known := package_version(name))},
    }
    if device.kind == "cuda":
        found["driver"] = _driver()
    return found


def device_text(device: DeviceInfo) -> str:
    """The device as a record of times names it: a CPU by its model, threads, instruction sets and
    caches, in the words of `r18 backends`."""
    return str(cpu()) if device.kind == "cpu" else device.name


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where `nvidia-smi` does not print it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def key_of(data: dict[str, Any]) -> str:
    """A short name for an environment; equal environments have equal names."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).replace(microsecond=0).isoformat()


__all__ = ["device_text", "environment", "key_of", "now"]
