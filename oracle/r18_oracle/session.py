"""A session: a backend's kernels on the problems of a profile, until a deadline, with a record.

`r18 perturb` and `r18 sanitize` run sessions. An entry of their records has the digest of its
kernel's sources and choices, and the key of the run that made it. While both are the same the
kernel need not be run again, so a session that was stopped can be continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from r18 import records
from r18.backend import Backend, DeviceInfo
from r18.backend.registry import checked_backend
from r18.errors import UsageError, unknown_kernel
from r18_oracle.search.records import digest_of


def backend_with(name: str, kernels: str) -> Backend:
    """The backend, not probed yet. It has kernels whose ids match the glob.

    Raises `UsageError` for the backend `auto`, and `UnknownName` if no kernel matches.
    """
    if name == "auto":
        raise UsageError("name the backend whose kernels to run: --backend NAME")
    backend = checked_backend(name)
    if not matching(backend, kernels):
        raise unknown_kernel(kernels, [kernel.id for kernel in backend.kernels()])
    return backend


def matching(backend: Backend, kernels: str) -> tuple[str, ...]:
    """The ids that match the glob; once the backend is probed, of the kernels of its device."""
    return tuple(kernel.id for kernel in backend.kernels() if fnmatchcase(kernel.id, kernels))


# -- the record ----------------------------------------------------------------------------------


class OfRun(Protocol):
    """An entry of a record. run: the key of the run that made it."""

    @property
    def run(self) -> str: ...


class OfKernel(OfRun, Protocol):
    """A kernel's entry. digest: of its sources and choices; None if these are not known."""

    @property
    def digest(self) -> str | None: ...


Run = TypeVar("Run", bound=msgspec.Struct)
Entry = TypeVar("Entry", bound=OfKernel)


class RecordedRun(Generic[Run]):
    """The present run of a session, to which the entries of earlier runs are compared.

    kind: the run's type in the record. earlier: the runs in the record, by key. request: what a
    result depends on, apart from the kernel. about: what else the record holds of the run.

    key: names the run in its entries. digests: of the backend's kernels as they are now, by id.
    """

    def __init__(
        self,
        kind: type[Run],
        earlier: Mapping[str, Run],
        device: DeviceInfo,
        backend: Backend,
        request: Mapping[str, Any],
        **about: Any,
    ) -> None:
        run = {**request, **about, "environment": records.environment(device)}
        self.key = records.key_of(run)
        self.digests = {kernel.id: digest_of(backend, kernel) for kernel in backend.kernels()}
        self._request = request
        self._runs = {**earlier, self.key: msgspec.convert(run, kind)}

    def current(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """The entries without those of this backend's kernels that have changed or are gone."""
        ours = {name.partition("/")[0] for name in self.digests}
        return {
            name: entry
            for name, entry in entries.items()
            if name.partition("/")[0] not in ours
            or (name in self.digests and entry.digest == self.digests[name])
        }

    def repeats(self, entry: OfKernel) -> bool:
        """Whether this run makes the same request of a current entry's kernel.

        Never for a kernel without a digest: it may have changed.
        """
        if entry.digest is None:
            return False
        then = self._runs[entry.run]
        return all(getattr(then, name) == value for name, value in self._request.items())

    def runs_of(self, *entries: OfRun) -> dict[str, Run]:
        """The runs that made these entries, by key."""
        used = {entry.run for entry in entries}
        return {key: run for key, run in self._runs.items() if key in used}


__all__ = ["RecordedRun", "backend_with", "matching"]
