"""`bench` from names to rows: what `r18 bench` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from r18.backend import Backend
from r18.backend.registry import get_backend, load_backend
from r18.bench import record
from r18.bench.contenders import Algorithm, contenders
from r18.bench.error import Error, is_worse, worse_words
from r18.bench.rows import ERROR_RATIO, RATIO, Contender, Row, Runner, with_ratios
from r18.bench.timing import Progress, Rounds, bench
from r18.errors import BackendUnavailable, R18Error, UsageError
from r18.graph.resnet import network
from r18.hooks import hook
from r18.machine import crowding, disturbances, machine
from r18.runtime.listing import lines
from r18.weights import load_weights

SPREAD = 1.5
"""p90 / p10 of a row's times above which its median says little: an idle machine stays below."""


@dataclass(frozen=True)
class Request:
    """The contenders to time, and how.

    backends:   names as `get_backend` takes them; None for all that can run on hardware.
    algorithms: OP=ALGORITHM pairs, each a contender of its own; ALGORITHM may be `all`.
    baselines:  as `r18.bench.baselines.ways` takes them.
    rounds:     how often each contender runs.
    check:      judge every output; the oracle's hook `output_judge` does it, and is needed. Errors
                are measured wherever that hook is installed.
    records:    the folder to record in; None records nothing.
    """

    backends: Sequence[str] | None
    precisions: Sequence[str]
    batches: Sequence[int]
    rounds: Rounds = field(default_factory=Rounds)
    fusion: str = "all"
    algorithms: Sequence[str] = ()
    baselines: str = "eager"
    network: str = "resnet18"
    weights: str = "synthetic"
    check: bool = False
    records: Path | None = None


@dataclass(frozen=True)
class Result:
    """The result of a benchmark.

    rows:     the right ones, with their ratios. wrong: those whose output lost too much.
    head:     network, weights, machine, and who was left out with the reason; as JSON has it.
    recorded: the record files that were written.
    """

    rows: list[Row]
    wrong: list[Row]
    head: Mapping[str, Any]
    recorded: tuple[Path, ...]

    @property
    def warnings(self) -> list[str]:
        """Why times may say little, and which were bought with a larger error.

        There are warnings about the machine, about each row that spreads widely, and about each row
        that is faster than PyTorch and less exact.
        """
        rows = [row.to_json() for row in self.rows]
        of_cpu = any(row.device_kind == "cpu" for row in self.rows)
        return [
            *disturbances(self.head["machine"]),
            *(crowding(self.head["machine"]) if of_cpu else ()),
            *(worse_words(row) for row in rows if is_worse(row)),
            *(
                f"{row.backend}, {row.precision}, batch {row.batch}: a tenth of its runs took over "
                f"{row.p90_ms:.3g} ms, another under {row.p10_ms:.3g}: something else was running"
                for row in self.rows
                if row.p90_ms > SPREAD * row.p10_ms
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        ratios = {"ratio": RATIO, "error_ratio": ERROR_RATIO}
        return {**self.head, **ratios, "warnings": self.warnings, "rows": rows}


def run(
    request: Request,
    *,
    on_left_out: Callable[[str, str], None] = lambda contender, reason: None,
    progress: Progress | None = None,
) -> Result:
    """Time the backends and their baselines in turns; record each group when it is finished.

    on_left_out: called for contenders that cannot run, or are wrong, with the reason.
    Raises what an explicitly named backend raises that cannot run, and `UsageError`.
    """
    session = _Session(request, on_left_out)
    judge = session.judge()
    rows = bench(
        session.field,
        **asdict(request.rounds),
        judge=judge.loss if judge and request.check else None,
        error_of=judge.error if judge else session.no_error,
        progress=progress,
        on_skip=session.skip,
        on_group=session.keep,
    )
    right = with_ratios([row for row in rows if not is_wrong(row)])
    wrong = [row for row in rows if is_wrong(row)]
    return Result(right, wrong, session.head, tuple(session.recorded))


def is_wrong(row: Row) -> bool:
    """Whether its output lost more than it may."""
    return (row.loss or 0.0) > 1


class _Session:
    """One call of `run`: its contenders, those left out, and the written records."""

    def __init__(self, request: Request, on_left_out: Callable[[str, str], None]) -> None:
        self._request, self._on_left_out = request, on_left_out
        self._skipped: list[dict[str, str]] = []
        self._no_error = ""
        self._judge: Any = None
        backends = self._backends()
        self._schedule = network(request.network)
        self._weights = load_weights(request.weights, self._schedule)
        self.field = contenders(
            backends,
            self._schedule,
            self._weights,
            precisions=request.precisions,
            batches=request.batches,
            fusion=request.fusion,
            required=request.backends is not None,
            algorithms=algorithms(request.algorithms, backends),
            peers=request.baselines,
        )
        self.head = {
            "network": request.network,
            "weights": {"source": self._weights.source, "sha256": self._weights.sha256},
            "machine": machine(),
            "skipped": self._skipped,
        }
        self.recorded: dict[Path, None] = {}

    def _backends(self) -> dict[str, Backend]:
        """Each by the name to show; of all, those that cannot run on hardware are left out."""
        if self._request.backends is not None:
            named = ((name, get_backend(name)) for name in self._request.backends)
            return {
                found.name if name == "auto" else name: self._recordable(found)
                for name, found in named
            }
        found: dict[str, Backend] = {}
        for line in lines():
            if line.device is None:
                self._leave_out(line.name, line.cause)
            elif line.device.simulated:
                self._leave_out(line.name, f"{line.device}: its times say nothing of hardware")
            else:
                found[line.name] = load_backend(line.name)
        return found

    def _recordable(self, backend: Backend) -> Backend:
        """The backend. Raises `UsageError` if its times would be recorded and are a simulator's."""
        if self._request.records is not None and (device := backend.probe()).simulated:
            raise UsageError(
                f"--record: {device}: its times say nothing of hardware\n  leave out --record"
            )
        return backend

    def judge(self) -> Any:
        """The oracle's judge of outputs for the precisions in the field.

        None without an oracle, unless `check` needs it; `no_error` then says why.
        """
        what = "--check" if self._request.check else "the error of each row"
        precisions = {contender.precision for contender in self.field}
        try:
            self._judge = hook("output_judge", what)(self._schedule, self._weights, precisions)
            return self._judge
        except R18Error as error:
            if self._request.check:
                raise
            self._no_error = reason(error)
            self._leave_out("errors against float64", self._no_error)
            return None

    def no_error(self, contender: Contender, runner: Runner) -> Error:
        """An `error_of` without an oracle: raises with the reason."""
        raise UsageError(self._no_error)

    def skip(self, contender: Contender, error: Exception) -> None:
        """A contender could not be made."""
        name = f"{contender.name}, {contender.precision}, batch {contender.shape[0]}"
        self._leave_out(name, reason(error))

    def keep(self, rows: list[Row]) -> None:
        """Record the right rows of a group, as soon as they are there."""
        for row in filter(is_wrong, rows):
            fault = self._judge.fault(row)
            why = fault or f"it loses {row.loss:.3g} times what it may against float64"
            name = f"{row.backend}, {row.precision}, batch {row.batch}"
            self._leave_out(name, f"its output is wrong: {why}")
        request = self._request
        if request.records is not None:
            right = with_ratios([row for row in rows if not is_wrong(row)])
            written = record.save(right, self.field, self.head, request.fusion, request.records)
            self.recorded.update(dict.fromkeys(written))

    def _leave_out(self, contender: str, why: str) -> None:
        self._skipped.append({"contender": contender, "reason": why})
        self._on_left_out(contender, why)


def algorithms(pairs: Sequence[str], backends: Mapping[str, Backend]) -> list[Algorithm]:
    """OP=ALGORITHM pairs; `all` stands for every algorithm that the backends have for the op."""
    found: dict[Algorithm, None] = {}
    for pair in pairs:
        op, equals, algorithm = pair.partition("=")
        if not (op and equals and algorithm):
            raise UsageError(f"--algorithms takes OP=ALGORITHM, separated by commas, got '{pair}'")
        every = [k.algorithm for b in backends.values() for k in b.kernels() if k.op.name == op]
        names = every if algorithm == "all" and every else [algorithm]
        found |= dict.fromkeys((op, name) for name in names)
    return list(found)


def reason(error: Exception) -> str:
    """Why a contender was left out, in a line."""
    if isinstance(error, BackendUnavailable):
        return error.cause
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, R18Error) else f"{type(error).__name__}: {lines[0]}"


__all__ = ["Request", "Result", "run"]
