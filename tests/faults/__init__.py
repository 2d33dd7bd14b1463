"""Kernels that test the oracle: planted faults, cheats and correct but unusual controls.

`FAULTS` are mistakes that people make, each with the check that must catch it; `TWINS` are built
from the same pieces and are right. `faults.cheats` are kernels that try to pass without computing,
`faults.controls` are right and must never raise an alarm. From the folder tests/,
`r18 verify --backend faults:Backend` runs the planted faults.
"""

from __future__ import annotations

from faults import (
    bias,
    classifier,
    conv,
    conv_maxpool,
    conv_projection,
    groups,
    memory,
    others,
    pairs,
    pixels,
    quantized,
    rounds,
    scaled,
    state,
    winograd,
)
from faults.fault import Fault, HostBackend, LateStream

PARTS = (
    conv,
    pairs,
    winograd,
    groups,
    conv_maxpool,
    conv_projection,
    classifier,
    others,
    pixels,
    memory,
    rounds,
    bias,
    quantized,
    scaled,
    state,
)
FAULTS: tuple[Fault, ...] = tuple(fault for part in PARTS for fault in part.FAULTS)
TWINS = tuple(twin for part in PARTS for twin in part.TWINS)


class Backend(HostBackend):
    """Every planted fault, as a backend."""

    def __init__(self) -> None:
        super().__init__([fault.kernel for fault in FAULTS])

    def stream(self) -> LateStream:
        return LateStream()


__all__ = ["FAULTS", "TWINS", "Backend", "Fault", "HostBackend"]
