"""Records: evidence from a device, as JSON files that are committed.

One file for each thing shown and each device: `verify-nvidia-h200.json`, `bench-nvidia-h200.json`.
A record appears whole or not at all, and a later run replaces only what it measured anew.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from r18.atomic import write_text
from r18.backend import DeviceInfo
from r18.errors import UsageError
from r18.machine import package_version

FOLDER = Path("exports/records")
FORMAT = 1
REMEDY = "  take it out of the folder, and make it anew: --record writes it"
"""Of a record that cannot be used."""

# What decides the numbers of a run, where it is installed.
PACKAGES = (
    "r18",
    "numpy",
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


def slug(device: DeviceInfo) -> str:
    """The device in a file's name; see `DeviceInfo.slug`."""
    return device.slug


def path_of(folder: Path, what: str, device: DeviceInfo) -> Path:
    """Where the record of `what` ("verify", "bench", ...) on a device lies."""
    return folder / f"{what}-{slug(device)}.json"


def environment(device: DeviceInfo) -> dict[str, Any]:
    """What a run depended on besides our sources: the device, its driver, versions."""
    found: dict[str, Any] = {
        "device": {"kind": device.kind, "name": device.name, **device.details},
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: said for name in PACKAGES if (said := package_version(name))},
    }
    if device.kind == "cuda":
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where `nvidia-smi` does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(said.stdout.split()), None)


def key_of(data: dict[str, Any]) -> str:
    """A short name for an environment, the same for the same."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def now() -> str:
    """The time, UTC, to the second, as ISO 8601 has it."""
    return datetime.now(UTC).replace(microsecond=0).isoformat()


def read(path: Path, what: str) -> dict[str, Any]:
    """A record of `what`, or an empty one where there is no file.

    Raises `UsageError` for a file that is damaged, or of another kind or format.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {"record": what, "format": FORMAT}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the record '{path}': {error}\n{REMEDY}") from None
    if not isinstance(data, dict) or (data.get("record"), data.get("format")) != (what, FORMAT):
        raise UsageError(f"'{path}' is no {what} record that this version of r18 wrote\n{REMEDY}")
    return data


def read_all(folder: Path, what: str) -> dict[str, dict[str, Any]]:
    """Every device's record of `what` in a folder, by the device's slug; raises as `read`."""
    paths = sorted(folder.glob(f"{what}-*.json"))
    return {path.stem.removeprefix(f"{what}-"): read(path, what) for path in paths}


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a record, whole or not at all. Raises `R18Error` where it cannot be written."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


__all__ = [
    "FOLDER",
    "FORMAT",
    "environment",
    "key_of",
    "now",
    "path_of",
    "read",
    "read_all",
    "slug",
    "write",
]
