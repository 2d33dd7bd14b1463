"""Kernels that are wrong on purpose, and the check that must catch each.

`FAULTS` are mistakes that someone makes; `r18_oracle.faults.cheats` are kernels that try to pass;
`TWINS` are built of the same pieces and are right. `r18 verify --backend r18_oracle.faults:Backend`
runs the faults, like any backend.
"""

from __future__ import annotations

from r18_oracle.faults import conv, conv_maxpool, memory, others, pixels, winograd
from r18_oracle.faults.fault import Fault, HostBackend, LateStream

PARTS = (conv, winograd, conv_maxpool, others, pixels, memory)
FAULTS: tuple[Fault, ...] = tuple(fault for part in PARTS for fault in part.FAULTS)
TWINS = tuple(twin for part in PARTS for twin in part.TWINS)


class Backend(HostBackend):
    """Every planted fault, as a backend."""

    def __init__(self) -> None:
        super().__init__([fault.kernel for fault in FAULTS])

    def stream(self) -> LateStream:
        return LateStream()


__all__ = ["FAULTS", "TWINS", "Backend", "Fault", "HostBackend"]
