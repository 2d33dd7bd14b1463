"""What NVRTC made of each CUDA function on each architecture, recorded to spare tests compiling.

`python tests/compiled.py` compiles the changes and rewrites compiled.json next to it. An entry
counts for the same sources, headers and macros; anything else is compiled in the test. It names its
NVRTC and counts for others too: pip installs a newer one every few months, and to compile
everything takes five minutes. The tests compile a sample with the one that is here. With
R18_COMPILE_ALL=1, as in the nightly run, they compile everything, and so does this command.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from cuda_support import ARCHITECTURES, entries
from r18.atomic import write_text
from r18_cupy.catalogue import all_kernels
from r18_cupy.cuda.compiler import Entry, capability, compile_entry, compile_ptx
from support import COMPILE_ALL

RECORD = Path(__file__).with_suffix(".json")
SERIALIZED = "wgmma.mma_async instructions are serialized"


@dataclass(frozen=True)
class Compiled:
    """A function for one architecture: threads of a block that it is compiled for, its
    registers, the bytes that it spills, and whether the assembler gave up overlapping its products,
    as it does where it does not see through the code.
    """

    threads: int
    registers: int
    spill_nbytes: int
    serialized: bool


def label(entry: Entry) -> str:
    return "-".join([entry.symbol, *(f"{name}={value}" for name, value in entry.defines)])


@cache
def targets(entry: Entry) -> tuple[str, ...]:
    """The architectures that run a function."""
    minimum = max(k.minimum_capability for k in all_kernels() if entry in k.entries())
    every = (entry.family,) if entry.family else ARCHITECTURES
    return tuple(target for target in every if capability(target) >= minimum)


def compiled(entry: Entry, target: str) -> Compiled:
    """From the record if it has this function, else from NVRTC."""
    known = {} if os.environ.get(COMPILE_ALL) else recorded(entry)
    return Compiled(**known[target]) if target in known else compile_now(entry, target)


def compile_now(entry: Entry, target: str) -> Compiled:
    binary = compile_entry(entry, target)
    assert binary.cubin.startswith(b"\x7fELF")
    needs = binary.resources
    serialized = SERIALIZED in binary.report
    return Compiled(launch_bound(entry, target), needs.registers, needs.spill_nbytes, serialized)


def launch_bound(entry: Entry, target: str) -> int:
    """Threads of a block, as `__launch_bounds__` says: PTX has them as `.maxntid`."""
    _, _, body = compile_ptx(entry, target).partition(f".entry {entry.symbol}(")
    found = re.search(r"\)\s*\.maxntid (\d+)(?:, 1, 1)?\s", body)
    assert found, f"{entry.symbol} has no launch bounds"
    return int(found[1])


def recorded(entry: Entry) -> dict[str, Any]:
    """The record of a function, by architecture; empty if it was made from other sources."""
    found = _record().get(label(entry), {})
    return dict(found["targets"]) if found.get("digest") == entry.digest else {}


def by_this_compiler(entry: Entry) -> bool:
    """Whether a recorded function was compiled with the NVRTC that is here."""
    return bool(_record()[label(entry)]["nvrtc"] == toolkit())


@cache
def toolkit() -> str:
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}, package {version('nvidia-cuda-nvrtc')}"


@cache
def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def _updated() -> Iterator[tuple[str, dict[str, Any]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for entry in entries():
            if recorded(entry) and not os.environ.get(COMPILE_ALL):
                yield label(entry), _record()[label(entry)]
                continue
            found = pool.map(lambda target, entry=entry: compile_now(entry, target), targets(entry))
            found_for = {t: asdict(c) for t, c in zip(targets(entry), found, strict=True)}
            yield label(entry), {"digest": entry.digest, "nvrtc": toolkit(), "targets": found_for}


if __name__ == "__main__":
    write_text(RECORD, json.dumps(dict(sorted(_updated())), indent=1) + "\n")
