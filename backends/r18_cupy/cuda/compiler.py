"""CUDA C++ to machine code: NVRTC through `cuda.core`, with a cache on disk.

Compiling needs no GPU: every kernel can be compiled for every architecture anywhere. CuPy's own
compiler is not used, because it forces `-ftz=true`, cannot target `sm_90a`, and does not hash
included headers.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from r18 import cache as kept
from r18.backend import Resources
from r18.backend.digest import combined, cuda_digest
from r18.errors import R18Error, UsageError
from r18.machine import cache_folder, package_version
from r18_cupy.cuda.perturb import perturbed_sources

KERNELS = Path(__file__).parents[1] / "kernels"
STANDARD = "c++17"
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The targets of every kernel that does not need architecture-specific instructions."""
_FORMAT = 3  # format version of a cached file
_PACKAGES = tuple(
    f"nvidia-cuda-{part}{of}" for part in ("nvrtc", "runtime") for of in ("", "-cu12")
)


class CompileError(R18Error):
    """A kernel does not compile; the message has file, line and flags."""


@dataclass(frozen=True)
class Entry:
    """A `__global__` function: its source and compiler flags.

    source:  `conv/direct` for `kernels/conv/direct.cu`.
    symbol:  its name, declared `extern "C"`.
    defines: macros, rendered as `-D` flags.
    family:  an architecture-specific target (`sm_90a`) that its instructions need: it is compiled
    for this target and runs on no other.
    """

    source: str
    symbol: str
    defines: tuple[tuple[str, str | int], ...] = ()
    family: str | None = None

    @property
    def file(self) -> str:
        """The source's path in `kernels/`."""
        return f"{self.source}.cu"

    @property
    def path(self) -> Path:
        return KERNELS / self.file

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's flags without the architecture."""
        macros = tuple(f"-D{name}={value}" for name, value in self.defines)
        return (f"-std={STANDARD}", *macros)

    @property
    def label(self) -> str:
        """The symbol and its macros."""
        return " ".join([self.symbol, *(f"{name}={value}" for name, value in self.defines)])

    @property
    def digest(self) -> str:
        """sha256 over all of ours that makes the binary: sources, headers, symbol and flags."""
        code = cuda_digest(self.path, KERNELS)
        return combined([self.symbol, *self.flags, self.family or "", code])


@dataclass(frozen=True)
class Binary:
    """A compiled entry: machine code for one architecture, and the assembler's report."""

    symbol: str
    cubin: bytes
    report: str

    @property
    def resources(self) -> Resources:
        """Parsed from `ptxas -v`. Raises `CompileError` if NVRTC has not passed the report on."""
        _, _, about = self.report.partition(f"Function properties for {self.symbol}\n")
        if not about:
            raise CompileError(
                f"{_toolkit()} does not report the resources of '{self.symbol}'\n"
                "  pip install --upgrade nvidia-cuda-nvrtc cuda-core"
            )

        def number(pattern: str) -> int:
            found = re.search(pattern, about)
            return int(found[1]) if found else 0

        return Resources(
            registers=number(r"Used (\d+) registers"),
            shared_nbytes=number(r"(\d+) bytes smem"),
            stack_nbytes=number(r"(\d+) bytes stack frame"),
            spill_nbytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        )


def architecture(entry: Entry, capability: tuple[int, int]) -> str:
    """The target for a device of this compute capability: `sm_90`, or the entry's own target."""
    return entry.family or f"sm_{capability[0]}{capability[1]}"


def capability(target: str) -> tuple[int, int]:
    """The compute capability of a target: (9, 0) for `sm_90` and `sm_90a`.

    Raises `UsageError` for other names.
    """
    found = re.fullmatch(r"sm_(\d+)(\d)[af]?", target)
    if found is None:
        raise UsageError(f"an architecture is named like sm_90 or sm_90a, got '{target}'")
    return int(found[1]), int(found[2])


def compile_entry(entry: Entry, target: str, *, perturbed: bool = False) -> Binary:
    """Machine code for `target` (`sm_80`, `sm_90a`, ...), from the cache or from NVRTC.

    perturbed: from the sources with delays, see `r18_cupy.cuda.perturb`. Raises `CompileError`.
    Safe to call from several processes and threads at once.
    """
    asked = f"{_FORMAT} {entry.digest} {target} {_toolkit()}"
    if perturbed:
        sources = perturbed_sources(KERNELS)
        asked += f" {combined([part for pair in sources.items() for part in pair])}"
    key = hashlib.sha256(asked.encode()).hexdigest()
    path = cache_folder() / "cubin" / f"{entry.symbol}-{target}-{key[:32]}.cubin"
    found = _read(path, entry.symbol)
    if found is not None:
        return found
    binary = _compile_perturbed(entry, target) if perturbed else _compile(entry, target)
    head = json.dumps({"report": binary.report})
    kept.store(path, head.encode() + b"\n" + binary.cubin)
    return binary


@cache
def compile_ptx(entry: Entry, target: str) -> str:
    """The PTX that NVRTC makes of an entry's module for `target`, before the assembler.

    Calls NVRTC itself, because cuda.core asks the driver for its version when it makes PTX, and a
    machine without a GPU has no driver. Raises `CompileError`.
    """
    options = [*entry.flags, f"-arch={target.replace('sm_', 'compute_')}"]
    sources = {entry.file: entry.path.read_text("utf-8")}
    with _compiled(entry, sources, options, f"does not compile to PTX for {target}") as program:
        return str(_output(program, "PTX").rstrip(b"\0"), "ascii")


def _compile_perturbed(entry: Entry, target: str) -> Binary:
    """From the sources with delays, which are only in memory."""
    options = [*entry.flags, f"-arch={target}", "--ptxas-options=-v"]
    sources = perturbed_sources(KERNELS)
    failed = f"with delays does not compile for {target}"
    with _compiled(entry, sources, options, failed) as program:
        return Binary(entry.symbol, _output(program, "CUBIN"), _log(program))


@contextmanager
def _compiled(
    entry: Entry, sources: Mapping[str, str], options: Sequence[str], failed: str
) -> Iterator[Any]:
    """NVRTC's program of an entry, compiled; sources: its own, and headers that are in memory.

    Raises `CompileError`, which says that the entry `failed`.
    """
    from cuda.bindings import nvrtc

    options = [*options, *(f"-I{folder}" for folder in _include_paths())]
    headers = {name: text for name, text in sources.items() if name != entry.file}
    created, program = nvrtc.nvrtcCreateProgram(
        sources[entry.file].encode(),
        f"kernels/{entry.file}".encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    try:
        encoded = [option.encode() for option in options]
        (compiled,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(created) or int(compiled):
            raise CompileError(
                f"{entry.file} {failed}: {compiled.name}\n{_log(program)}\n"
                f"  flags: {' '.join(options)}"
            )
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _output(program: Any, what: str) -> bytes:
    """The `PTX`, `CUBIN` or `ProgramLog` of a program of NVRTC."""
    from cuda.bindings import nvrtc

    sized, nbytes = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    content: bytes = b" " * nbytes
    (fetched,) = getattr(nvrtc, f"nvrtcGet{what}")(program, content)
    if int(sized) or int(fetched):
        raise CompileError(f"NVRTC has no {what} of a program: {sized.name}, {fetched.name}")
    return content


def _log(program: Any) -> str:
    return str(_output(program, "ProgramLog").rstrip(b"\0 "), "utf-8", "replace")


def compile_all(
    entries: Iterable[Entry], target: tuple[int, int], *, perturbed: bool = False
) -> None:
    """Compile entries into the cache, several at a time."""
    wanted = dict.fromkeys(entries)

    def compiled(entry: Entry) -> Binary:
        return compile_entry(entry, architecture(entry, target), perturbed=perturbed)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(compiled, wanted))


def _read(path: Path, symbol: str) -> Binary | None:
    """A binary of the cache; None if it is absent or damaged."""
    content = kept.load(path)
    if content is None:
        return None
    head, _, cubin = content.partition(b"\n")
    return Binary(symbol, cubin, str(json.loads(head)["report"]))


_import_lock = threading.Lock()


@cache
def _core() -> Any:
    with _import_lock:
        import cuda.core

    return cuda.core


@cache
def _include_paths() -> tuple[str, ...]:
    from cuda.pathfinder import find_nvidia_header_directory

    cudart = find_nvidia_header_directory("cudart")
    if cudart is None:
        raise CompileError(
            "the headers of the CUDA runtime (cuda_fp16.h) were not found\n"
            "  pip install nvidia-cuda-runtime, or set CUDA_HOME"
        )
    return (str(KERNELS), cudart)


@cache
def _toolkit() -> str:
    """Identifies the toolkit: NVRTC's version, its headers' folder, and both packages' versions.

    NVRTC reports only major and minor version, but a patch release may generate other code.
    """
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    versions = ((name, package_version(name)) for name in _PACKAGES)
    packages = [f"{name} {said}" for name, said in versions if said is not None]
    return " ".join([f"nvrtc {major}.{minor}", _include_paths()[1], *packages])


def _compile(entry: Entry, target: str) -> Binary:
    core = _core()
    options = core.ProgramOptions(
        name=f"kernels/{entry.file}",
        std=STANDARD,
        arch=target,
        include_path=list(_include_paths()),
        define_macro=[(name, str(value)) for name, value in entry.defines] or None,
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    try:
        program = core.Program(entry.path.read_text(), "c++", options)
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core raises a different class in each layer
        raise CompileError(
            f"{entry.file} does not compile for {target}: {error}\n{log.getvalue()}"
            f"  flags: {' '.join((*entry.flags, f'-arch={target}'))}"
        ) from error
    if entry.symbol.encode() not in code:
        raise CompileError(
            f"there is no function '{entry.symbol}' in {entry.file}; is it extern \"C\"?"
        )
    return Binary(entry.symbol, code, log.getvalue())
