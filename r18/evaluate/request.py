"""A request: everything that decides an evaluation's results, except for the images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import r18
from r18.backend import CompileOptions
from r18.errors import R18Error, WeightsError
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.weights import Weights, load_weights
from r18.weights.sources import resolved


@dataclass(frozen=True)
class Request:
    """Two programs on the same images; it can be sent to another machine that sees the same files.

    weights:        as `load_weights` takes them, with an absolute path. weights_sha256: of these.
    backend:        a name of the registry or module:attr.
    against:        the reference's, None for no reference.
    against_precision: the reference's precision; what a narrow backend is measured by is fp32.
    batch:          images a run.
    version:        r18's: another one may compute otherwise.
    """

    network: str
    weights: str
    weights_sha256: str
    backend: str
    against: str | None = "torch"
    precision: str = "fp32"
    against_precision: str = "fp32"
    fusion: str = "all"
    batch: int = 8
    version: str = r18.__version__

    @classmethod
    def of(cls, network: str, weights: Weights, backend: str, **others: Any) -> Request:
        """The request for weights that were loaded."""
        return cls(network, resolved(weights.source), weights.sha256, backend, **others)

    @property
    def schedule(self) -> Schedule:
        return network(self.network)

    def options(self, precision: str) -> CompileOptions:
        return CompileOptions(batch=self.batch, precision=precision, fusion=self.fusion)

    def identity(self) -> dict[str, Any]:
        """The settings that must be equal for results to be mixed: all but the path of the
        weights."""
        data = asdict(self)
        del data["weights"]
        return data

    def load(self) -> Weights:
        """The weights, on whatever machine this runs.

        Raises what `load_weights` raises, `WeightsError` for others than those asked for, and
        `R18Error` where another version of r18 would compute.
        """
        if r18.__version__ != self.version:
            raise R18Error(
                f"the request is of r18 {self.version}, and here is r18 {r18.__version__}\n"
                "  install the same version on every machine"
            )
        weights = load_weights(self.weights, self.schedule, self.precision)
        if weights.sha256 != self.weights_sha256:
            raise WeightsError(
                f"weights '{self.weights}' have sha256 {weights.sha256[:16]}…, asked for were "
                f"{self.weights_sha256[:16]}…\n  the file here is another one, or was replaced"
            )
        return weights


__all__ = ["Request"]
