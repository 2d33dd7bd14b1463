"""Instructions to emulate where the CPU lacks them, so that it can verify kernels that use them.

`R18_NUMBA_CPU_EMULATE` names them: `amx`, `vnni`, or both with a comma between. What the CPU has is
not emulated. The device then counts as simulated: `auto` never takes it, and its times are not
recorded.
"""

from __future__ import annotations

import os

from r18.errors import BackendUnavailable
from r18_numba_cpu.compiled import NAME

VARIABLE = "R18_NUMBA_CPU_EMULATE"
KNOWN = ("amx", "vnni")


def requested() -> tuple[str, ...]:
    """The names in the environment, sorted. Raises `BackendUnavailable` for others than `KNOWN`."""
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := sorted(names - set(KNOWN)):
        raise BackendUnavailable(
            NAME,
            f"{VARIABLE} names {', '.join(map(repr, unknown))}; known: {', '.join(KNOWN)}",
            f"unset {VARIABLE}",
        )
    return tuple(sorted(names))


__all__ = ["KNOWN", "VARIABLE", "requested"]
