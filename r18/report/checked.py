"""Whether a record holds what a page shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r18.errors import UsageError
from r18.records import REMEDY

Form = Mapping[str, Any]
"""Keys that must be there, each with the form of its value: None for a plain value, a mapping for
an object, `[form]` for a list, `{"*": form}` for a table by name. `key?` may be absent."""


def _plain(keys: str) -> dict[str, None]:
    return dict.fromkeys(keys.split())


_RUN = _plain("date precision batch repeat") | {
    "environment": {"device": _plain("kind name"), "packages": {}},
    "machine": _plain("processor cpus"),
}
_STEP = _plain("step kernel milliseconds")
_TIMED = _plain(
    "backend algorithm median_ms p10_ms p90_ms ms_per_image images_per_second ratio best_ratio "
    "best_peer"
) | {"steps": [_STEP]}
_LEVEL = _plain("contender cpu_ms cpu_ratio cuda_ms cuda_ratio loss")
_PROFILED = (
    _RUN
    | _plain("backend channels_last")
    | {
        "environment": {"device": _plain("kind name"), "packages": _plain("torch")},
        "weights": _plain("source"),
        "rows": [_LEVEL],
    }
)
_KERNEL = _plain(
    "date verified findings problems refused error_over_bound error_over_statistical_line"
)
_JUDGED = _plain("step kernel problem ratio ok check message")
_NETWORK = _plain("backend precision") | {
    "steps": [_JUDGED],
    "checkpoints": [_plain("relative own_relative")],
}
_MUTATION = _plain("date profile limit mutants killed survived equivalent invalid left score")
_KILLED = {"status": None, "kernels": [None], "finding": _plain("check")}
_OTHER = {"status": None, "finding": None, "kernels": [None], "before": None, "after": None}
_RAN = _plain("problems errors") | {"complaints?": [_plain("what function count")]}
FORMS: dict[str, Form] = {
    "bench": {"groups": {"*": _RUN | _plain("network fusion warmup") | {"rows": [_TIMED]}}},
    "profile": {"device": None, "groups": {"*": _PROFILED}},
    "verify": {
        "device": None,
        "kernels": {"*": _KERNEL},
        "networks": {"*": _NETWORK},
    },
    "mutate": {
        "device": None,
        "backends": {"*": _MUTATION | {"results": {"*": lambda fate: _fate(fate)}}},
    },
    "sanitize": {
        **_plain("device sanitizer"),
        "tools": {"*": _plain("date errors verdict missing") | {"kernels": {"*": _RAN}}},
    },
}
"""By the command that writes the record."""


def _fate(entry: Any) -> Form:
    """A mutant's entry: a caught one names the check, another one its change."""
    if not isinstance(entry, Mapping) or "status" not in entry:
        return _plain("status")
    return _KILLED if entry["status"] == "killed" else _OTHER


def check(path: Path, record: Any, what: str) -> None:
    """Raise `UsageError` for a record of `r18 <what>` that lacks what a page shows."""
    _check(path, record, FORMS[what])


def _check(path: Path, data: Any, form: Any) -> None:
    form = form(data) if callable(form) else form
    if form is None:
        return
    if not isinstance(data, Mapping):
        raise _damaged(path, f"it has {str(data)[:20]!r} in place of {', '.join(form)}")
    lacking = [key for key in form if key not in data and not key.endswith("?")]
    if lacking:
        raise _damaged(path, f"it lacks {', '.join(lacking)}")
    for name, inner in form.items():
        key = name.removesuffix("?")
        if key not in data:
            continue
        if isinstance(inner, list):
            if not isinstance(data[key], list):
                raise _damaged(path, f"its {key} are not a list")
            entries = data[key]
        elif isinstance(inner, dict) and "*" in inner:
            if not isinstance(data[key], Mapping):
                raise _damaged(path, f"its {key} are not a table")
            entries, inner = list(data[key].values()), [inner["*"]]
        else:
            entries, inner = [data[key]], [inner]
        for entry in entries:
            _check(path, entry, inner[0])


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"the record '{path}' is damaged or of an older r18: {why}\n{REMEDY}")


__all__ = ["FORMS", "check"]
