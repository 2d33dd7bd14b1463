"""Records of verified kernels, their device and their sources: `verify-<device>.json`.

Each kernel has an entry: the digest of its sources and choices, what was run, and its largest
error/bound. A kernel that has changed since is stale and must be verified again. A record of one
device is enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.backend import Backend, Kernel
from r18.errors import UsageError, counted
from r18.records.kinds import VerifiedKernel, VerifiedNetwork, Verify
from r18_oracle.findings import Finding
from r18_oracle.search.verify import BackendResult, Request, Verification
from r18_oracle.search.verify_text import kernel_json

WHAT = "verify"
PROFILES = ("thorough", "nightly")
"""The profiles that search long enough for a record."""


def check_profile(name: str) -> None:
    """Raise `UsageError` for a profile that is too short for a record."""
    if name not in PROFILES:
        raise UsageError(
            f"a record is of the profile {' or '.join(PROFILES)}, not of '{name}': leave out "
            "--profile or --record"
        )


def save(verification: Verification, backends: Mapping[str, Backend], folder: Path) -> list[str]:
    """Write the results to the record of each backend's device; returns a line for each.

    backends: those that were verified, by the names in `verification`. See `keep`.
    """
    lines: list[str] = []
    for result in verification.backends:
        if not result.executed:
            continue
        path = keep(result, verification.request, backends[result.name], folder)
        if path is None:
            lines.append(f"{result.name}: not recorded: {result.device} is simulated")
        else:
            lines.append(told(result, path))
    return lines


def keeper(
    request: Request, backends: Mapping[str, Backend], folder: Path | None
) -> Callable[[BackendResult], None]:
    """For `verify`: keeps each sound part at once, since a run may be ended from outside.

    Without a folder it keeps nothing.
    """

    def kept(part: BackendResult) -> None:
        if folder is not None:
            keep(part, request, backends[part.name], folder)

    return kept


def keep(result: BackendResult, request: Request, backend: Backend, folder: Path) -> Path | None:
    """Write a backend's results, or those so far, to the record of its device; returns its path.

    Entries of kernels and networks that were not run stay as they are, except for kernels that the
    backend no longer has. A kernel with any finding is recorded as not verified. Runs on a
    simulated device are not recorded, since they show nothing about compiled code.
    """
    if result.device.simulated:
        return None
    path = records.path_of(folder, WHAT, result.device)
    records.update(path, Verify, lambda old: merged(old, request, result, backend))
    return path


def merged(
    old: Verify | None,
    request: Request,
    result: BackendResult,
    backend: Backend,
) -> Verify:
    """The record with a run's entries instead of older ones."""
    old = old or Verify(device="", environments={}, kernels={}, networks={})
    environment = records.environment(result.device)
    run = {
        "profile": request.profile.name,
        "network": request.network,
        "seed": request.seed,
        "date": records.now(),
        "environment": records.key_of(environment),
    }
    known = {kernel.id: kernel for kernel in backend.kernels()}
    prefixes = {name.partition("/")[0] for name in known}
    kernels = {
        name: entry
        for name, entry in old.kernels.items()
        if name in known or name.partition("/")[0] not in prefixes
    }
    kernels |= _kernels(result, backend, known, run)
    networks = dict(old.networks)
    for checked in result.checkpoints:
        name = f"{result.name}/{checked.network}/{checked.precision}/{checked.fusion}"
        about = {"weights": request.weights, "verified": checked.ok}
        networks[name] = msgspec.convert(run | about | checked.to_json(), VerifiedNetwork)
    now = {records.key_of(environment): msgspec.convert(environment, records.Environment)}
    used = {entry.environment for entry in kernels.values()}
    used |= {entry.environment for entry in networks.values()}
    return Verify(
        device=result.device.name,
        environments={k: v for k, v in (old.environments | now).items() if k in used},
        kernels=dict(sorted(kernels.items())),
        networks=dict(sorted(networks.items())),
    )


def _kernels(
    result: BackendResult,
    backend: Backend,
    known: Mapping[str, Kernel],
    run: Mapping[str, Any],
) -> dict[str, VerifiedKernel]:
    """The entries of the kernels that a run took part in."""
    found: dict[str, list[Finding]] = {}
    for finding in result.findings:
        found.setdefault(finding.kernel, []).append(finding)
    entries: dict[str, Any] = {}
    for report in result.kernels:
        data = kernel_json(report)
        name = data.pop("kernel")
        entries[name] = {
            **run,
            "digest": digest_of(backend, known[name]),
            "verified": report.verdict == "ok" and name not in found,
            "findings": [finding.to_json() for finding in found.get(name, [])],
            **data,
        }
    return msgspec.convert(entries, dict[str, VerifiedKernel])


def digest_of(backend: Backend, kernel: Kernel) -> str | None:
    """A digest of the kernel's sources and of the ids of its variants, which are checked with it.

    None for a kernel that is not compiled from its own sources.
    """
    digest = kernel.digest
    if digest is None or not (found := backend.variants(kernel)):
        return digest
    parts = (digest, *(variant.id for variant in found))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def stale(
    backend: Backend, kernels: Iterable[Kernel], verified: Iterable[Verify]
) -> dict[str, str]:
    """The kernels, by id, whose current digest is not verified in any record, with the reason.

    kernels: the backend's. verified: the records of any number of devices. Kernels without a
    digest are left out, since there is nothing to compare.
    """
    recorded = list(verified)
    reasons: dict[str, str] = {}
    for kernel in kernels:
        digest = digest_of(backend, kernel)
        if digest is None:
            continue
        entries = [r.kernels[kernel.id] for r in recorded if kernel.id in r.kernels]
        if any(entry.verified and entry.digest == digest for entry in entries):
            continue
        if any(entry.verified for entry in entries):
            reasons[kernel.id] = "has changed since it was verified"
        elif entries:
            checks = sorted({found.check for entry in entries for found in entry.findings})
            reasons[kernel.id] = f"failed when it was last run ({', '.join(checks) or 'refused'})"
        else:
            reasons[kernel.id] = "was never verified"
    return reasons


def settled(backends: Mapping[str, Backend], folder: Path) -> frozenset[str]:
    """The ids of kernels that are verified, as they are now, on the backends' own devices."""
    found: set[str] = set()
    for backend in backends.values():
        record = records.load(records.path_of(folder, WHAT, backend.probe()), Verify)
        kernels = backend.kernels()
        compiled = {kernel.id for kernel in kernels if kernel.digest is not None}
        found |= compiled - stale(backend, kernels, [record] if record else []).keys()
    return frozenset(found)


def told(result: BackendResult, path: Path) -> str:
    """A line about what a run wrote to a record."""
    failed = {finding.kernel for finding in result.findings}
    bad = [r.kernel for r in result.kernels if r.verdict != "ok" or r.kernel in failed]
    good = len(result.kernels) - len(bad)
    said = f"{path}: {counted(good, 'kernel')} of {result.name} recorded as verified"
    return said + (f"; NOT verified: {', '.join(bad)}" if bad else "")
