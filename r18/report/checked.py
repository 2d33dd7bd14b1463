"""Whether a record holds what a page says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from r18.errors import UsageError
from r18.records import REMEDY

_GROUP = (
    *("network", "precision", "fusion", "batch", "date", "warmup", "repeat"),
    *("environment", "machine"),
)
_ROW = (
    *("backend", "algorithm", "median_ms", "p10_ms", "p90_ms", "ms_per_image"),
    *("images_per_second", "ratio", "best_ratio", "best_peer"),
)
_PROFILE = (
    *("backend", "precision", "batch", "channels_last", "date", "repeat", "weights"),
    *("environment", "machine"),
)
_LEVEL = ("contender", "cpu_ms", "cpu_ratio", "cuda_ms", "cuda_ratio", "loss")
_KERNEL = (
    *("date", "verified", "findings", "problems", "refused", "error_over_bound"),
    "error_over_statistical_line",
)
_STEP = ("step", "kernel", "problem", "ratio", "ok", "check", "message")
_RUN = (
    *("date", "profile", "limit", "mutants", "killed", "survived", "equivalent", "invalid"),
    *("left", "score"),
)
_FATE = ("status", "finding")
_CHANGE = ("before", "after")
_TOOL = ("date", "errors", "verdict", "missing")


def check_timed(path: Path, record: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a record of `r18 bench` without what a page says of it.

    So do the others, each for its command's record.
    """
    for group in _entries(path, record, "groups"):
        _check(path, group, _GROUP)
        _check_where(path, group)
        for row in _listed(path, group, "rows"):
            _check(path, row, _ROW)
            for step in _listed(path, row, "steps"):
                _check(path, step, ("step", "kernel", "milliseconds"))


def check_profiled(path: Path, record: Mapping[str, Any]) -> None:
    _check(path, record, ("device",))
    for group in _entries(path, record, "groups"):
        _check(path, group, _PROFILE)
        _check_where(path, group)
        _check(path, group["environment"]["packages"], ("torch",))
        _check(path, group["weights"], ("source",))
        for row in _listed(path, group, "rows"):
            _check(path, row, _LEVEL)


def _check_where(path: Path, group: Mapping[str, Any]) -> None:
    """What a group was timed on."""
    _check(path, group["environment"], ("device", "packages"))
    _check(path, group["environment"]["device"], ("kind", "name"))
    _check(path, group["machine"], ("processor", "cpus"))


def check_verified(path: Path, record: Mapping[str, Any]) -> None:
    _check(path, record, ("device",))
    for kernel in _entries(path, record, "kernels"):
        _check(path, kernel, _KERNEL)
    for run in _entries(path, record, "networks"):
        _check(path, run, ("backend", "precision"))
        for step in _listed(path, run, "steps"):
            _check(path, step, _STEP)


def check_mutated(path: Path, record: Mapping[str, Any]) -> None:
    _check(path, record, ("device",))
    for run in _entries(path, record, "backends"):
        _check(path, run, _RUN)
        for fate in _entries(path, run, "results"):
            _check(path, fate, _FATE)
            _listed(path, fate, "kernels")
            if fate["status"] == "killed":
                _check(path, fate["finding"], ("check",))
            else:
                _check(path, fate, _CHANGE)


def check_sanitized(path: Path, record: Mapping[str, Any]) -> None:
    _check(path, record, ("device", "sanitizer"))
    for tool in _entries(path, record, "tools"):
        _check(path, tool, _TOOL)
        for kernel in _entries(path, tool, "kernels"):
            _check(path, kernel, ("problems", "errors"))
            if "complaints" in kernel:
                for complaint in _listed(path, kernel, "complaints"):
                    _check(path, complaint, ("what", "function", "count"))


def _entries(path: Path, data: Any, key: str) -> Iterable[Any]:
    """The values of a table by name."""
    _check(path, data, (key,))
    found = data[key]
    if not isinstance(found, Mapping):
        raise _damaged(path, f"its {key} are no table")
    return found.values()


def _listed(path: Path, data: Any, key: str) -> Iterable[Any]:
    _check(path, data, (key,))
    found = data[key]
    if not isinstance(found, list):
        raise _damaged(path, f"its {key} are no list")
    return found


def _check(path: Path, data: Any, keys: Iterable[str]) -> None:
    if not isinstance(data, Mapping):
        raise _damaged(path, f"it has {str(data)[:20]!r} in place of {', '.join(keys)}")
    if lacking := [key for key in keys if key not in data]:
        raise _damaged(path, f"it lacks {', '.join(lacking)}")


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"the record '{path}' is damaged or of an older r18: {why}\n{REMEDY}")


__all__ = ["check_mutated", "check_profiled", "check_sanitized", "check_timed", "check_verified"]
