"""A network run: a whole network on a backend, compared with float64 at every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache

from r18.errors import UsageError, described, raised_in
from r18.graph.resnet import network
from r18.weights import Weights, load_weights
from r18_oracle.findings import RUN, Finding
from r18_oracle.judge.reference import KernelRunning
from r18_oracle.loading import loaded_backend
from r18_oracle.network.checkpoint_report import CheckpointReport
from r18_oracle.network.checkpoints import Shared, compare_checkpoints, seeded_images
from r18_oracle.network.plans import WrongPlan
from r18_oracle.search.campaign import Announce


@dataclass(frozen=True)
class NetworkRun:
    """A network in one precision on `samples` seeded images; `weights` names a weights source."""

    network: str
    weights: str
    precision: str
    fusion: str
    samples: int
    seed: int

    def on(self, backend: str, announce: Announce) -> CheckpointReport | Finding:
        """Run it on a backend; a `Finding` instead of a report if the program raises.

        Raises `UsageError` for weights and images that no precision can represent, and what
        making a weights source raises.
        """
        schedule = network(self.network)
        weights = _weights(self.weights, self.network)
        images = seeded_images(schedule, self.samples, self.seed)
        try:
            report = compare_checkpoints(
                loaded_backend(backend),
                schedule,
                weights,
                images,
                precision=self.precision,
                fusion=self.fusion,
                backend_name=backend,
                seed=self.seed,
                progress=lambda step, problem: announce(problem, "network", self.seed),
                shared=_shared(self.network, self.weights, self.samples, self.seed),
            )
        except UsageError:
            raise
        except Exception as error:  # any exception of the program is a finding
            return self._raised(backend, error)
        if report.findings:
            _shared.cache_clear()  # a kernel may have written to it
        details = {RUN: asdict(self)}
        findings = tuple(replace(f, details=f.details | details) for f in report.findings)
        return replace(report, findings=findings)

    def _raised(self, backend: str, error: Exception) -> Finding:
        _shared.cache_clear()
        if isinstance(error, WrongPlan):
            return self.finding("runs", backend, str(error))
        check = "independence" if isinstance(error, KernelRunning) else "runs"
        where = raised_in(error, ours=True)
        return self.finding(check, backend, f"raised {described(error, f' in {where}')}")

    def refused(self, backend: str, reason: str) -> Finding:
        """The finding that the backend cannot run the network in the requested precision."""
        message = f"cannot run {self.network} in {self.precision}: {reason}"
        return self.finding("coverage", backend, message)

    def finding(self, check: str, backend: str, message: str) -> Finding:
        """A finding on the whole program, which has no kernel and no problem."""
        return Finding(
            check=check,
            backend=backend,
            kernel=program_label(backend, self.fusion, self.precision),
            problem=None,
            kind="network",
            seed=self.seed,
            message=message,
            details={RUN: asdict(self)},
        )


def program_label(backend: str, fusion: str, precision: str) -> str:
    """The name that a finding on a whole program has in place of a kernel."""
    return f"{backend}/program/{fusion}/{precision}"


@cache
def _weights(source: str, network_name: str) -> Weights:
    return load_weights(source, network(network_name))


@lru_cache(maxsize=1)  # some 100 MB for ResNet-18 and few images
def _shared(network_name: str, weights: str, samples: int, seed: int) -> Shared:
    """The results shared by the runs of a network on these weights and images."""
    return Shared()
