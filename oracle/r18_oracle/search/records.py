"""What was verified, on which device, from which sources: `verify-<device>.json`.

An entry a kernel: the digest of what it was compiled from and of what it chooses among, what was
run, and how close to its bound it came. A kernel that has changed since is stale, and must be
verified again; one device's record is enough for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from r18 import records
from r18.backend import Backend, Kernel
from r18.errors import UsageError
from r18_oracle.findings import Finding
from r18_oracle.search.verify import BackendResult, Verification, counted
from r18_oracle.search.verify_text import kernel_json

WHAT = "verify"
PROFILES = ("thorough", "nightly")
"""The profiles that look long enough for a record."""


def check_profile(name: str) -> None:
    """Raises `UsageError` for a profile that is too short for a record."""
    if name not in PROFILES:
        raise UsageError(
            f"a record is of the profile {' or '.join(PROFILES)}, not of '{name}': leave out "
            "--profile or --record"
        )


def save(verification: Verification, backends: Mapping[str, Backend], folder: Path) -> list[str]:
    """Write what was run to the record of each backend's device; returns what to say of each.

    backends: those that were verified, by the names in `verification`. Entries of kernels and
    networks that were not run stay as they are, except for kernels that the backend no longer
    has. A kernel about which anything was found is written as not verified. What a simulated
    device ran is no evidence of what a compiler makes of it, and is not recorded.
    """
    said: list[str] = []
    for result in verification.backends:
        if not result.executed:
            continue
        if result.device.simulated:
            said.append(f"{result.name}: not recorded: {result.device} is simulated")
            continue
        path = records.path_of(folder, WHAT, result.device)
        record = records.read(path, WHAT)
        records.write(path, merged(record, verification, result, backends[result.name]))
        said.append(told(result, path))
    return said


def merged(
    record: Mapping[str, Any],
    verification: Verification,
    result: BackendResult,
    backend: Backend,
) -> dict[str, Any]:
    """The record with the entries of a run in place of older ones."""
    environment = records.environment(result.device)
    run = {
        "profile": verification.request.profile.name,
        "network": verification.request.network,
        "seed": verification.request.seed,
        "date": records.now(),
        "environment": records.key_of(environment),
    }
    found: dict[str, list[Finding]] = {}
    for finding in result.findings:
        found.setdefault(finding.kernel, []).append(finding)
    known = {kernel.id: kernel for kernel in backend.kernels()}
    prefixes = {name.partition("/")[0] for name in known}
    entries = {
        name: entry
        for name, entry in record.get("kernels", {}).items()
        if name in known or name.partition("/")[0] not in prefixes
    }
    for report in result.kernels:
        data = kernel_json(report)
        name = data.pop("kernel")
        entries[name] = run | {
            "digest": digest_of(backend, known[name]),
            "verified": report.verdict == "ok" and name not in found,
            "findings": [finding.to_json() for finding in found.get(name, [])],
            **data,
        }
    networks = dict(record.get("networks", {}))
    for checked in result.checkpoints:
        name = f"{result.name}/{checked.network}/{checked.precision}/{checked.fusion}"
        networks[name] = run | {
            "weights": verification.request.weights,
            "verified": checked.ok,
            **checked.to_json(),
        }
    environments = {**record.get("environments", {}), run["environment"]: environment}
    used = {entry["environment"] for entry in (*entries.values(), *networks.values())}
    return {
        "record": WHAT,
        "format": records.FORMAT,
        "device": result.device.name,
        "environments": {key: environments[key] for key in environments if key in used},
        "kernels": dict(sorted(entries.items())),
        "networks": dict(sorted(networks.items())),
    }


def digest_of(backend: Backend, kernel: Kernel) -> str | None:
    """Of the kernel's sources and of the ids of its variants, which are verified with it.

    None for a kernel that is not compiled from its own sources.
    """
    digest = kernel.digest
    if digest is None or not (found := backend.variants(kernel)):
        return digest
    parts = (digest, *(variant.id for variant in found))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def stale(
    backend: Backend, kernels: Iterable[Kernel], verified: Iterable[Mapping[str, Any]]
) -> dict[str, str]:
    """The kernels, by id, whose present digest no record holds as verified, and why.

    kernels: of the backend. verified: the records of any number of devices. Of kernels without a
    digest nothing is known, so they are not judged.
    """
    recorded = list(verified)
    reasons: dict[str, str] = {}
    for kernel in kernels:
        digest = digest_of(backend, kernel)
        if digest is None:
            continue
        entries = [r["kernels"][kernel.id] for r in recorded if kernel.id in r.get("kernels", {})]
        if any(entry["verified"] and entry["digest"] == digest for entry in entries):
            continue
        if any(entry["verified"] for entry in entries):
            reasons[kernel.id] = "has changed since it was verified"
        elif entries:
            checks = sorted({f["check"] for entry in entries for f in entry["findings"]})
            reasons[kernel.id] = f"failed when it was last run ({', '.join(checks) or 'refused'})"
        else:
            reasons[kernel.id] = "was never verified"
    return reasons


def settled(backends: Mapping[str, Backend], folder: Path) -> frozenset[str]:
    """The ids of kernels that the records of the backends' own devices hold as they stand."""
    found: set[str] = set()
    for backend in backends.values():
        record = records.read(records.path_of(folder, WHAT, backend.probe()), WHAT)
        kernels = backend.kernels()
        compiled = {kernel.id for kernel in kernels if kernel.digest is not None}
        found |= compiled - stale(backend, kernels, [record]).keys()
    return frozenset(found)


def told(result: BackendResult, path: Path) -> str:
    """What a run wrote to a record, in a sentence or two."""
    failed = {finding.kernel for finding in result.findings}
    bad = [r.kernel for r in result.kernels if r.verdict != "ok" or r.kernel in failed]
    good = len(result.kernels) - len(bad)
    said = f"{path}: {counted(good, 'kernel')} of {result.name} recorded as verified"
    return said + (f"; NOT verified: {', '.join(bad)}" if bad else "")
