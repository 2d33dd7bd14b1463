"""The three parts of the demonstration, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from r18.backend import CompileOptions
from r18.backend.registry import get_backend, title
from r18.bench.baselines import PEER
from r18.bench.rows import Row
from r18.bench.run import Request as Bench
from r18.bench.run import run as run_bench
from r18.bench.timing import Rounds
from r18.demo import planted
from r18.errors import UsageError, WeightsError
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.hooks import hook
from r18.images.classify import classify
from r18.stopwatch import part
from r18.weights import Weights, load_weights
from r18.weights.sources import imagenet_weights

PICTURE = Path(__file__).with_name("orange.jpg")
"""An orange, 400×320; `tools/draw_demo_picture.py` draws it."""
DOWNLOAD_SECONDS = 20.0
"""A slower download of ImageNet's weights is given up."""
ROUNDS = Rounds(warmup=2, repeat=10)
TOP = 5
OPERATOR = "adaptive_avg_pool2d"
PLACE = f"{planted.__name__}:{planted.divides_by_one_less.__name__}"


@dataclass(frozen=True)
class Request:
    """weights: as `load_weights` takes them; "" for ImageNet's if they are cached or are downloaded
    in `DOWNLOAD_SECONDS`, else synthetic ones. backend: a name, as `get_backend` takes it."""

    network: str = "resnet18"
    weights: str = ""
    backend: str = "auto"


@dataclass(frozen=True)
class Part:
    """What a part gave.

    lines: for people. data: the same as plain data. ok: False only if something is wrong; a part
    that needs what is not installed says so, and is ok.
    """

    title: str
    lines: tuple[str, ...]
    seconds: float = 0.0
    ok: bool = True
    data: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The title with the seconds, then the lines, indented."""
        body = (f"  {line}".rstrip() for line in self.lines)
        return "\n".join([f"{self.title} ({self.seconds:.1f} s)", *body])

    def to_json(self) -> dict[str, Any]:
        own = {"title": self.title, "seconds": round(self.seconds, 3), "ok": self.ok}
        return {**own, **self.data}


def demo(request: Request) -> Iterator[Part]:
    """The parts, each as soon as it is there: classes, speed, a planted bug.

    Raises what compiling the network on a named backend raises, and `WeightsError` for weights that
    were asked for and are not there.
    """
    schedule = network(request.network)
    begin = time.perf_counter()
    with part("weights"):
        weights, why = _weights(request.weights, schedule)
    yield _classes(request, schedule, weights, why, begin)
    yield _timed("speed", lambda: _speed(request, weights.source))
    yield _timed("a planted bug", _bug)


def _timed(name: str, make: Callable[[], Part]) -> Part:
    begin = time.perf_counter()
    with part(name):
        made = make()
    return Part(made.title, made.lines, time.perf_counter() - begin, made.ok, made.data)


def _weights(asked: str, schedule: Schedule) -> tuple[Weights, str]:
    """The weights; and why they are not ImageNet's, if nobody asked for others."""
    if asked:
        return load_weights(asked, schedule), ""
    try:
        return imagenet_weights(schedule, DOWNLOAD_SECONDS), ""
    except WeightsError as error:
        return load_weights("synthetic", schedule), str(error).splitlines()[0]


# -- classes -------------------------------------------------------------------------------------


def _classes(
    request: Request, schedule: Schedule, weights: Weights, why: str, begin: float
) -> Part:
    with part("backend found and probed"):
        backend = get_backend(request.backend)
        device = backend.probe()
    with part("network compiled"):
        program = backend.compile(schedule, weights, CompileOptions())
    try:
        classes = program.plan.tensors[program.plan.schedule.output].shape[-1]
        top = min(TOP, classes)
        (result,) = classify(program, [PICTURE], weights.preprocess, top=top)
    finally:
        program.close()
    lines = [
        f"{PICTURE.name}, a drawn picture: {schedule.name} on {title(backend)}, {device}",
        f"weights {weights.source}",
        *(
            f"  {guess.probability:9.4%}  {guess.index:4d}  {guess.name or ''}".rstrip()
            for guess in result.top
        ),
    ]
    if why:
        lines.append(why)
    if weights.source.startswith("synthetic"):
        lines.append("synthetic weights were never trained: these classes mean nothing")
    data = {
        "backend": backend.name,
        "device": device.name,
        "weights": weights.source,
        "top": [asdict(guess) for guess in result.top],
    }
    seconds = time.perf_counter() - begin
    return Part(f"the {top} most probable classes", tuple(lines), seconds, True, data)


# -- speed ---------------------------------------------------------------------------------------


def _speed(request: Request, weights: str) -> Part:
    """The network next to torchvision's in eager mode, in float32, one image at a time."""
    left_out: list[str] = []
    result = run_bench(
        Bench(
            [request.backend],
            ("fp32",),
            (1,),
            ROUNDS,
            network=request.network,
            weights=weights,
        ),
        on_left_out=lambda who, reason: left_out.append(f"left out: {who}: {reason}"),
    )
    lines = [_row(row) for row in result.rows]
    own = result.rows[0]
    if own.ratio is not None:
        lines.append(
            f"{own.backend} runs at {1 / own.ratio:.2f} times the speed of PyTorch, by medians of "
            f"{ROUNDS.repeat} runs in turns: a first impression; r18 bench measures"
        )
    if own.backend == "numpy" and request.backend == "auto":
        lines.append("numpy is the readable reference; pip install 'r18[numba]' compiles for CPUs")
    lines += [*left_out, *(f"warning: {warning}" for warning in result.warnings)]
    rows = [
        {
            "name": row.backend,
            "median_ms": row.median_ms,
            "p10_ms": row.p10_ms,
            "p90_ms": row.p90_ms,
        }
        for row in result.rows
    ]
    data = {"rows": rows, "time_over_pytorch": own.ratio, "left_out": left_out}
    return Part("speed, float32, one image at a time", tuple(lines), data=data)


def _row(row: Row) -> str:
    who = f"{row.backend}, PyTorch in eager mode" if row.backend == PEER else row.backend
    spread = f"p10..p90 {row.p10_ms:.3g}..{row.p90_ms:.3g}"
    error = f", error {row.error.relative:.1e} against float64" if row.error else ""
    return f"{row.median_ms:8.3g} ms  {who} ({spread}{error})"


# -- a planted bug -------------------------------------------------------------------------------


def _bug() -> Part:
    """A global average that divides by H·W − 1 is judged, and then the same one mended."""
    name = "a planted bug: a global average that divides by H·W − 1"
    try:
        judge = hook("assert_kernel", "finding it")
    except UsageError as error:
        lines = ("left out:", *str(error).splitlines())
        return Part(name, lines, data={"left_out": str(error)})
    wrong = _finding(judge, planted.divides_by_one_less)
    right = _finding(judge, planted.mended)
    found = wrong or "NOT FOUND: the oracle is at fault, please report it"
    lines = (*found.splitlines(), "", f"again with: r18 check {PLACE} --like {OPERATOR}", "")
    if right:
        lines += ("A FALSE ALARM of the oracle, please report it:", *right.splitlines())
    else:
        lines += ("divided by H·W, it passes every check",)
    return Part(
        name, lines, ok=bool(wrong) and not right, data={"found": wrong, "false_alarm": right}
    )


def _finding(judge: Any, kernel: Callable[..., Any]) -> str:
    """What the oracle says against a kernel; "" if nothing."""
    try:
        judge(kernel, OPERATOR, arrays="numpy", profile="brief", network=None)
    except AssertionError as error:
        return str(error)
    return ""


__all__ = ["DOWNLOAD_SECONDS", "PICTURE", "Part", "Request", "demo"]
