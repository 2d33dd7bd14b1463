"""Peak rates of a device, per instruction and memory, as a backend measures them.

Kernels cannot be faster than the instructions that they consist of. A backend that can issue one
instruction and nothing else measures its rate; `r18.bench.roofline` derives floors from it.
"""

from __future__ import annotations

from dataclasses import dataclass

COPY = "copy"
"""The copy in device memory, in bytes read and written together. Other names are the backend's."""


@dataclass(frozen=True)
class Pace:
    """Operations or bytes a second: the median and the best of several timed runs."""

    per_second: float
    best: float
    runs: int


@dataclass(frozen=True)
class Ceiling:
    """The rate of an instruction, or the bandwidth of a memory.

    what:      the instruction (`wgmma`), or what moves bytes (`copy`).
    precision: in which it multiplies, such as `fp16`, or another format (`e4m3`); a
               multiply-accumulate is two operations. "" for bytes.
    sustained: launches back to back, for at least a second.
    burst:     launches of a few milliseconds, each after a pause, while the device is cool.
    how:       what was run, in words.
    """

    what: str
    precision: str
    sustained: Pace
    burst: Pace
    how: str


__all__ = ["COPY", "Ceiling", "Pace"]
