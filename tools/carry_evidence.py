"""Carry the evidence of kernels over whose sources changed, but nothing that a device gets.

A record of `r18 verify` names a kernel with a digest of its sources. A host function that moves, or
a property that another kernel needs, changes the digest, and the record no longer covers the
kernel. Where the machine code, the launches and the packed weights are those of a revision that the
record covers, so are the results, and the record gets the new digest and the revision (`carried`).

python tools/carry_evidence.py REVISION [--backend cupy] [--kernels GLOB]

Compares each stale kernel of CUDA C++ with REVISION, for the devices whose records cover it there:
the machine code of all its functions, and, for every problem of the recorded profile and seed, the
refusal, the launches with all arguments, the scratch memory, and seeded weights as they are packed.
No GPU is needed. A kernel that differs stays stale, and what differs is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from r18 import records
from r18.backend import Backend, Kernel
from r18.backend.registry import load_backend
from r18.cli.app import REFUSED
from r18.errors import R18Error, UsageError
from r18.graph.ops import Problem
from r18.records.kinds import VerifiedKernel, Verify
from r18_oracle.generate.inputs import make_case
from r18_oracle.loading import with_choices
from r18_oracle.search.campaign import walk
from r18_oracle.search.profiles import profile
from r18_oracle.search.records import WHAT, digest_of, stale

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (".", "backends", "oracle")  # of a checkout
TARGET = {"NVIDIA H100": "sm_90", "NVIDIA H200": "sm_90"}
"""The architecture of a device, by the beginning of its name."""


@dataclass(frozen=True)
class Request:
    """What is compared of a kernel, as its record asks."""

    kernel: str
    target: str
    profile: str
    seed: int
    network: str | None


Parts = Mapping[str, str]
"""sha256 of each thing that a device gets, by what it is; and the digest, as `digest`."""


def plain(value: object) -> object:
    """A value in a form that prints the same wherever it prints. Raises `UsageError`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [type(value).__name__, *fields]
    if isinstance(value, np.ndarray | np.generic):
        made = np.asarray(value)
        content = hashlib.sha256(np.ascontiguousarray(made).tobytes()).hexdigest()
        return [str(made.dtype), list(made.shape), content]
    if isinstance(value, Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UsageError(f"cannot compare arguments of type {type(value).__name__}")


def parts_of(backend: Backend, request: Request) -> dict[str, str]:
    """What a device gets of a kernel and of its choices."""
    kernel = next((one for one in backend.kernels() if one.id == request.kernel), None)
    if kernel is None:
        return {}
    seen = {"launches": hashlib.sha256(), "packed weights": hashlib.sha256()}
    count = 0

    def look(one: Kernel, problem: Problem, seed: int, rounding: str) -> bool:
        nonlocal count
        count += 1
        made: Any = one
        refusal = one.refusal(problem)
        launches = () if refusal else made.launches(problem)
        scratch = () if refusal else made.scratch(problem)
        asks = [one.id, str(problem)]
        gets = [*asks, refusal, plain(launches), plain(scratch)]
        seen["launches"].update(json.dumps(gets).encode())
        if refusal is None:
            weights = make_case(one, problem, "normal", seed).weights
            packed = [*asks, plain(made.pack(problem, weights))]
            seen["packed weights"].update(json.dumps(packed).encode())
        return refusal is None

    walk(backend, kernel, profile(request.profile), request.seed, request.network, look, whole=True)
    code = hashlib.sha256()
    for one in with_choices(backend, [kernel]):
        code.update(f"{one.id} {one.machine_code(request.target)}".encode())
    found = {name: digest.hexdigest() for name, digest in seen.items()}
    return {
        "digest": digest_of(backend, kernel) or "",
        "machine code": code.hexdigest(),
        "problems": str(count),
        **found,
    }


def differences(before: Parts, now: Parts) -> list[str]:
    """What differs, apart from the digest."""
    names = sorted({*before, *now} - {"digest"})
    return [name for name in names if before.get(name) != now.get(name)]


def carried(entry: VerifiedKernel, before: Parts, now: Parts, revision: str) -> VerifiedKernel:
    """The entry of a record for the kernel as it is now.

    before, now: what a device gets at the revision, and now. Raises `UsageError` where that
    differs, or where the entry is not of that revision.
    """
    if not entry.verified or entry.digest != before.get("digest"):
        raise UsageError(f"the record does not cover it at {revision} either")
    if found := differences(before, now):
        raise UsageError(f"other {', '.join(found)} than at {revision}")
    return msgspec.structs.replace(entry, digest=now["digest"], carried=revision)


# -- two checkouts -----------------------------------------------------------------------------


def asked(root: Path, backend: str, requests: Sequence[Request]) -> dict[Request, Parts]:
    """`parts_of` each request, from a process that imports a checkout's packages."""
    path = os.pathsep.join(str(root / one) for one in PACKAGES)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--answer", "--backend", backend],
        input=json.dumps([dataclasses.asdict(one) for one in requests]),
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UsageError(f"the kernels of {root} could not be compared; see above")
    return dict(zip(requests, json.loads(done.stdout.splitlines()[-1]), strict=True))


def git(*arguments: str) -> str:
    """Run git in this checkout; returns its output. Raises `UsageError` with what it says if it
    fails.
    """
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UsageError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit_of(revision: str) -> str:
    """The first eight digits of the commit, which a name like HEAD does not stand for tomorrow."""
    return git("rev-parse", "--short=8", "--verify", f"{revision}^{{commit}}")


def answer(backend: str) -> None:
    """Print `parts_of` the requests on the standard input."""
    loaded = load_backend(backend)
    root = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    source = Path(sys.modules[type(loaded).__module__].__file__ or "")
    if not source.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"'{backend}' was imported from {source}, not from {root}")
    requests = [Request(**one) for one in json.load(sys.stdin)]
    print(json.dumps([parts_of(loaded, one) for one in requests]))


def requests_of(record: Verify, changed: Collection[str]) -> list[Request]:
    """What to compare of the changed kernels that a record covers."""
    target = next((t for name, t in TARGET.items() if record.device.startswith(name)), None)
    if target is None:
        return []
    found = ((name, record.kernels[name]) for name in sorted(changed) if name in record.kernels)
    return [
        Request(name, target, entry.profile, entry.seed, entry.network)
        for name, entry in found
        if entry.verified
    ]


def carry(revision: str, backend: str, pattern: str, folder: Path) -> int:
    """Carry evidence over in the records of a folder; returns the number of stale kernels left."""
    revision = commit_of(revision)
    loaded = load_backend(backend)
    kernels = [one for one in loaded.kernels() if fnmatchcase(one.id, pattern)]
    found = records.load_all(folder, Verify)
    changed = stale(loaded, kernels, found.values()).keys()
    requests = {slug: requests_of(record, changed) for slug, record in found.items()}
    every = sorted({one for some in requests.values() for one in some}, key=str)
    with tempfile.TemporaryDirectory() as made:
        checkout = Path(made) / "checkout"
        git("worktree", "add", "-q", "--detach", str(checkout), revision)
        try:
            before, now = asked(checkout, backend, every), asked(ROOT, backend, every)
        finally:
            git("worktree", "remove", "--force", str(checkout))
    left = set(changed)
    for slug, record in found.items():
        entries = dict(record.kernels)
        for one in requests[slug]:
            said = "carried over"
            try:
                entry = entries[one.kernel]
                entries[one.kernel] = carried(entry, before[one], now[one], revision)
                left.discard(one.kernel)
            except UsageError as error:
                said = str(error)
            print(f"{record.device}: {one.kernel}: {said}")
        if entries != record.kernels:
            path = folder / f"{WHAT}-{slug}.json"
            records.write(path, msgspec.structs.replace(record, kernels=entries))
    return len(left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--kernels", default="*", metavar="GLOB")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.backend)
        return 0
    try:
        left = carry(options.revision, options.backend, options.kernels, ROOT / records.FOLDER)
    except R18Error as error:
        print(f"carry_evidence: {error}", file=sys.stderr)
        return REFUSED
    print(f"{left} stale kernels left")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
