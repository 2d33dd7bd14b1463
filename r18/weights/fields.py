"""Fields of a manifest, which is not trusted. All raise `ManifestError` without the file's name."""

from __future__ import annotations

from collections.abc import Mapping

from r18.errors import ManifestError, show, unknown


def field(data: Mapping[str, object], name: str, of: str = "") -> object:
    """A field that must be there."""
    if name not in data:
        raise ManifestError(f"the field '{name}'" + (f" of {of}" if of else "") + " is missing")
    return data[name]


def check_known(data: Mapping[str, object], known: tuple[str, ...], kind: str) -> None:
    """Raise for a field that is none of the known ones."""
    for name in data:
        if name not in known:
            raise unknown(kind, name[:80], known, error=ManifestError)


def as_object(value: object, what: str) -> dict[str, object]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ManifestError(f"{what} must be an object, got {show(value)}")
    return value


def as_list(value: object, what: str, of: str = "objects") -> list[object]:
    """A JSON list."""
    if not isinstance(value, list):
        raise ManifestError(f"{what} must be a list of {of}, got {show(value)}")
    return value


def as_text(value: object, what: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ManifestError(f"{what} must be a text that is not empty, got {show(value)}")
    return value


def as_extent(value: object, what: str) -> int:
    """A positive integer that fits in 31 bits."""
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ManifestError(
            f"{what} must be made of integers from 1 to 2^31 − 1, got {show(value)}"
        )
    return value


def as_shape(value: object, what: str) -> tuple[int, ...]:
    """A list of extents."""
    return tuple(as_extent(extent, what) for extent in as_list(value, what, "integers"))


__all__ = ["as_extent", "as_list", "as_object", "as_shape", "as_text", "check_known", "field"]
