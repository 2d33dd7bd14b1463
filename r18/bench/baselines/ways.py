"""The peers of a benchmark, and the kinds of device that each runs on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from r18.errors import UsageError, unknown

KINDS = {
    "eager": ("cpu", "cuda"),
    "graph": ("cuda",),  # a way around a GPU's launches
    "compile": ("cuda",),  # the same, by its CUDA graphs
    "onnxruntime": ("cpu",),
    "openvino": ("cpu",),
}
"""The kinds of devices on which each mode is a peer."""
MODES = tuple(KINDS)
EXPORTED = ("onnxruntime", "openvino")
"""The modes that run an exported model and choose layouts for themselves."""


@dataclass(frozen=True)
class Way:
    """A peer: one of `MODES`; torchvision's in channels-last memory or in NCHW."""

    mode: str = "eager"
    channels_last: bool = False

    @property
    def name(self) -> str:
        if self.mode in EXPORTED:
            return self.mode
        return f"torchvision {self.mode}" + (", channels-last" if self.channels_last else "")

    def suits(self, kind: str) -> bool:
        """Whether it is a peer on a kind of device."""
        return kind in KINDS[self.mode] and (kind == "cuda" or not self.channels_last)


PEER = Way().name
WAYS = tuple(
    Way(mode, channels_last)
    for mode in MODES
    for channels_last in ((False,) if mode in EXPORTED else (False, True))
)
PEERS = tuple(way.name for way in WAYS)
TORCH = {way.name: way for way in WAYS if way.mode not in EXPORTED}
"""The peers that PyTorch runs."""


def ways(modes: str, kinds: Iterable[str]) -> dict[str, tuple[Way, ...]]:
    """The peers that `--peers` asks for, by kind of device.

    modes: some of `MODES` separated by commas, or "all". `PEER` is always among them, and in both
           layouts when `modes` names another mode of torchvision's.

    A mode that was named and suits none of the kinds is put with the first: it cannot be made
    there, and so is left out with a reason. Raises `UnknownName`; `UsageError` for a repetition.
    """
    asked = MODES if modes == "all" else tuple(name.strip() for name in modes.split(","))
    for name in asked:
        if name not in MODES:
            raise unknown("peer", name, [*MODES, "all"])
    if len(set(asked)) != len(asked):
        raise UsageError(f"--peers names one twice: '{modes}'")
    found = {kind: _on(kind, asked) for kind in kinds}
    if modes != "all" and found:
        first = next(iter(found))
        idle = (way for way in map(Way, asked) if not any(map(way.suits, found)))
        found[first] += tuple(way for way in idle if way not in found[first])
    return found


def _on(kind: str, asked: Iterable[str]) -> tuple[Way, ...]:
    suited = [way for way in WAYS if way.mode in asked and way.suits(kind)]
    if {way.mode for way in suited} <= {Way().mode, *EXPORTED}:
        suited = [way for way in suited if not way.channels_last]
    return tuple(way for way in WAYS if way in suited or way == Way())


__all__ = ["MODES", "PEER", "PEERS", "TORCH", "WAYS", "Way", "ways"]
