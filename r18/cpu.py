"""The CPU: instructions that kernels choose by, cores, NUMA nodes and caches.

Linux tells all of it in `/proc/cpuinfo` and `/sys`. Elsewhere only the name and the counts are
known. A backend decides for itself what it uses: this is for people and records.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

INFO = Path("/proc/cpuinfo")
SYSTEM = Path("/sys/devices/system")

INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
    "asimd": "NEON",
    "asimddp": "NEON dot products",
    "bf16": "NEON BF16",
    "sve": "SVE",
}
"""The names of instruction sets that decide the speed of kernels, by Linux's flags."""

WIDEST = ("AMX-INT8", "AVX-512", "AVX2", "SVE", "NEON")
"""The sets that tell one generation of a processor from another, the newest first."""

_DECORATION = re.compile(r"\((?:R|TM|C)\)|@?\s*\d[\d.]*\s*[GM]Hz|\b\w+-Cores?\b", re.IGNORECASE)

KIB = 1024
_UNITS = {"": 1, "K": KIB, "M": KIB**2, "G": KIB**3}


@dataclass(frozen=True)
class Cpu:
    """The CPU, as far as this process may use it.

    name:         the processor's own.
    threads:      hardware threads. cores: those that these threads belong to.
    nodes:        NUMA nodes: each has memory of its own.
    instructions: values of `INSTRUCTIONS`, in that order.
    caches:       bytes of each data cache that the first thread reaches, by name: L1d, L2, L3.
    sharing:      threads that share each of them.
    Cores, nodes and caches are 0 or empty where the system does not tell.
    """

    name: str
    threads: int
    cores: int = 0
    nodes: int = 0
    instructions: tuple[str, ...] = ()
    caches: tuple[tuple[str, int], ...] = ()
    sharing: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        counts = [_counted(self.threads, "thread")]
        if self.cores:
            counts.append(f"of {_counted(self.cores, 'core')}")
        if self.nodes > 1:
            counts.append(f"in {self.nodes} NUMA nodes")
        shared = dict(self.sharing)
        caches = [
            f"{name} {_size(nbytes)}" + (f" for {shared[name]} threads" if shared[name] > 1 else "")
            for name, nbytes in self.caches
        ]
        return ", ".join((f"{self.name}: {' '.join(counts)}", *self.instructions, *caches))

    def to_json(self) -> dict[str, Any]:
        """The CPU as records have it."""
        lists = {"instructions": list(self.instructions)}
        return asdict(self) | lists | {"caches": dict(self.caches), "sharing": dict(self.sharing)}


def cpu() -> Cpu:
    """The CPU of this machine."""
    usable = threads()
    facts = _facts()
    cores = {core for thread in usable if (core := _core(thread)) is not None}
    caches = list(_caches(usable[0]))
    return Cpu(
        facts.get("model name") or platform.processor() or platform.machine(),
        len(usable),
        len(cores),
        sum(1 for node in SYSTEM.glob("node/node[0-9]*") if _numbers(node / "cpulist") & {*usable}),
        _instructions(facts),
        tuple((name, nbytes) for name, nbytes, _ in caches),
        tuple((name, len(sharers & {*usable})) for name, _, sharers in caches),
    )


def model(name: str, instructions: Collection[str] = ()) -> str:
    """A processor's name without trademarks, clock and number of cores.

    "Intel(R) Core(TM) i7-9700K CPU @ 3600 MHz" is "Intel Core i7-9700K CPU". A hypervisor may hide
    the number, which generations differ in; then the widest of the `instructions` is added: "AMD
    EPYC (AVX2)".
    """
    plain = " ".join(_DECORATION.sub("", name).split())
    widest = next((words for words in WIDEST if words in instructions), "")
    return f"{plain} ({widest})" if plain and widest and not re.search(r"\d", plain) else plain


def model_slug() -> str:
    """The model of this machine's CPU in a file's name, such as `amd-epyc-avx2`.

    `cpu` where the system names no model.
    """
    facts = _facts()
    named = model(facts.get("model name", ""), _instructions(facts))
    return re.sub(r"[^a-z0-9]+", "-", named.lower()).strip("-") or "cpu"


def threads() -> tuple[int, ...]:
    """The numbers of the hardware threads that this process may use."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # macOS has none
        return tuple(sorted(process.cpu_affinity()))
    return tuple(range(psutil.cpu_count() or 1))


def _facts() -> dict[str, str]:
    """The facts in `/proc/cpuinfo` about the first thread; its flags are in small letters."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in INFO.read_text().splitlines():
            if not line.strip() and found:
                break
            name, _, value = line.partition(":")
            found[name.strip().lower()] = value.strip()
    return found


def _instructions(facts: dict[str, str]) -> tuple[str, ...]:
    """Values of `INSTRUCTIONS`, in that order."""
    flags = set(facts.get("flags", facts.get("features", "")).split())
    return tuple(name for flag, name in INSTRUCTIONS.items() if flag in flags)


def _core(thread: int) -> tuple[str, str] | None:
    """Package and core of a hardware thread."""
    topology = SYSTEM / "cpu" / f"cpu{thread}" / "topology"
    with suppress(OSError):
        return _text(topology / "physical_package_id"), _text(topology / "core_id")
    return None


def _caches(thread: int) -> Iterator[tuple[str, int, set[int]]]:
    """Name, bytes and threads of the caches of a thread that hold data, the nearest first."""
    for folder in sorted((SYSTEM / "cpu" / f"cpu{thread}" / "cache").glob("index[0-9]*")):
        with suppress(OSError):
            kind, level = _text(folder / "type"), _text(folder / "level")
            size = re.fullmatch(r"(\d+)([KMG]?)", _text(folder / "size"))
            if kind != "Instruction" and size:
                nbytes = int(size[1]) * _UNITS[size[2]]
                name = f"L{level}{'d' if kind == 'Data' else ''}"
                yield name, nbytes, _numbers(folder / "shared_cpu_list")


def _numbers(path: Path) -> set[int]:
    """The numbers in a list such as `0-3,8`; empty where there is none."""
    with suppress(OSError, ValueError):
        parts = (part.partition("-") for part in _text(path).split(",") if part)
        return {n for first, _, last in parts for n in range(int(first), int(last or first) + 1)}
    return set()


def _text(path: Path) -> str:
    return path.read_text().strip()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _size(nbytes: int) -> str:
    return f"{nbytes // KIB**2} MiB" if nbytes % KIB**2 == 0 else f"{nbytes // KIB} KiB"


__all__ = ["INSTRUCTIONS", "WIDEST", "Cpu", "cpu", "model", "model_slug", "threads"]
