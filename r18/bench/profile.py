"""Where a forward pass spends its time: torchvision's module and the drop-in at each level.

PyTorch's profiler measures single runs. CPU time is the host's from the call to its return: on a
CPU the whole computation, on a GPU what it takes to launch it. CUDA time is the sum over all that
the run makes the GPU do. Contenders of a batch take turns; a round is each of them once. The best
round counts for each column, because profiling has a cost of its own and the best round is the
least disturbed. Each profile starts with an unrecorded run, as PyTorch's documentation advises: on
a GPU the first launches also set up the profiler. `r18 bench` measures medians without a profiler.

PyTorch is imported when it is needed: the core works without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r18.atomic import new_file
from r18.backend import Array
from r18.backend.registry import get_backend
from r18.bench.timing import random_images, rotated
from r18.errors import BackendUnavailable, NoKernel, R18Error, UsageError, unknown
from r18.graph.schedule import Schedule

MODEL = "torchvision"
"""The contender that the others are compared with."""
LEVELS = ("add_relu", "conv_bn_relu", "all")
"""The drop-in's fusion levels; see `r18.torch`."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_UP = 3
"""Runs of each contender before any is profiled: they compile, tune and capture."""
PRECISIONS = ("fp32", "fp16x3", "tf32", "fp16", "bf16", "fp64")
_MARK = "r18 profile"
_STEP = "ProfilerStep#"  # the profiler's own mark around what it records


@dataclass(frozen=True)
class Row:
    """A contender at a batch: best of the rounds, in milliseconds a batch.

    cpu_ms, cuda_ms: see the module; `cuda_ms` is None on a CPU.
    cpu_ratio, cuda_ratio: divided by the time of `MODEL`; below 1 is faster.
    loss: its output's error against float64, as a fraction of the allowed; None if not judged.
    """

    contender: str
    batch: int
    cpu_ms: float
    cuda_ms: float | None
    cpu_ratio: float
    cuda_ratio: float | None
    loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Judge = Callable[[str, int, Callable[[Array], Array], str, Iterable[str]], float]
"""From a contender's name, the batch, a function from images to logits, the fusion level and the
algorithms of its kernels to the loss as a fraction of the allowed; above 1 it is wrong."""


@dataclass(frozen=True)
class Skipped:
    """A level that the backend cannot run, or whose output is wrong, with the reason."""

    contender: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The result of profiling: where, the rows by batch, and the levels left out or wrong."""

    device: str
    backend: str
    precision: str
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    wrong: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class _Run:
    """One profiled run: its times, and the profiler, which can still write its trace."""

    cpu_ms: float
    cuda_ms: float | None
    profiler: Any

    @property
    def decisive_ms(self) -> float:
        return self.cpu_ms if self.cuda_ms is None else self.cuda_ms


def profile(
    backend: str,
    kind: str,
    schedule: Schedule,
    weights: Mapping[str, Array],
    *,
    batches: Sequence[int] = BATCHES,
    levels: Sequence[str] = LEVELS,
    precision: str = "fp32",
    repeat: int = 5,
    channels_last: bool = False,
    traces: Path | None = None,
    judge: Judge | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Profile torchvision's module and the drop-in at some levels, at some batches.

    backend:   a name of the registry. kind: the kind of its device, "cpu" or "cuda".
    schedule, weights: ResNet-18 at level `none`, for the size of images.
    repeat:    rounds; the best counts.
    channels_last: the module and the images lie in channels-last memory.
    traces:    a folder: the best run of each is written there as a Chrome trace,
               `CONTENDER-batchN.json`.
    judge:     asked about the output of each contender at each batch; a wrong one is no row.
    progress:  called with a description of each run that starts.

    A level for which the backend has no kernels is left out and reported. Raises
    `BackendUnavailable` without PyTorch or where it sees no such device, `UnknownName` for a level
    or precision that does not exist, `UsageError` for numbers that make no sense, `R18Error` where
    torchvision's own module is wrong, `OSError` where a trace cannot be written.
    """
    _check(batches, levels, precision, repeat)
    torch = _torch(kind)
    rows: list[Row] = []
    skipped: dict[Skipped, None] = {}
    wrong: list[Skipped] = []
    with _switches(torch, kind, precision), torch.inference_mode():
        model = _model(torch, schedule, weights, kind, precision, channels_last)
        for batch in batches:
            # A new drop-in for each batch, so that only one batch's memory is held.
            calls = {MODEL: model, **_drop_ins(model, backend, levels, precision, skipped)}
            losses: dict[str, float] = {}
            if judge is not None:
                progress(f"batch {batch}: judging")
                losses = _losses(torch, judge, calls, model, backend, precision, batch)
                wrong += _take_wrong(calls, losses, batch)
            (array,) = random_images((batch, *schedule.input_shape), 1)
            images = _like_weights(torch, array, model)
            runs = _rounds(torch, calls, images, repeat, progress)
            rows += _rows(batch, runs, losses)
            if traces is not None:
                _write_traces(traces, batch, runs)
    cpu = f"CPU, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name() if kind == "cuda" else cpu
    where = f"{device}, PyTorch {torch.__version__}"
    return Report(where, backend, precision, tuple(rows), tuple(skipped), tuple(wrong))


def _check(batches: Sequence[int], levels: Sequence[str], precision: str, repeat: int) -> None:
    if not batches or min(batches) < 1 or len(set(batches)) != len(batches):
        raise UsageError(f"a profile takes different batches of at least 1, got {list(batches)}")
    if repeat < 1:
        raise UsageError(f"a profile takes at least 1 round, got {repeat}")
    for level in levels:
        if level not in LEVELS:
            raise unknown("fusion level of a drop-in", level, LEVELS)
    if precision not in PRECISIONS:
        raise unknown("precision of a profile", precision, PRECISIONS)


def _torch(kind: str) -> Any:
    try:
        import torch
        import torchvision  # noqa: F401 - said here that it is missing
    except ImportError as error:
        raise BackendUnavailable(
            MODEL, f"it does not import: {error}", "pip install 'r18[torch]'"
        ) from error
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise BackendUnavailable(MODEL, f"PyTorch sees no device of kind '{kind}'")
    return torch


@contextmanager
def _switches(torch: Any, kind: str, precision: str) -> Iterator[None]:
    """Switch PyTorch's TF32 on or off, and cuDNN's benchmark mode on.

    Next to fp16x3, PyTorch computes in float32.
    """
    if kind != "cuda":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32
    tf32 = precision == "tf32"
    cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32 = tf32, True, tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32 = before


# -- contenders --------------------------------------------------------------------------------


def _model(
    torch: Any,
    schedule: Schedule,
    weights: Mapping[str, Array],
    kind: str,
    precision: str,
    channels_last: bool,
) -> Any:
    """torchvision's module with the weights, on the device, in the dtype of the precision."""
    from torchvision.models import resnet18

    from r18.torch.storage import storage_dtype

    with torch.inference_mode(False):  # the drop-in must be able to follow the weights
        model = resnet18(num_classes=schedule.shapes(1)[schedule.output][1])
        state = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
        model.load_state_dict(state, strict=False)  # it also counts batches, which changes nothing
        format = torch.channels_last if channels_last else torch.contiguous_format
        return model.eval().to(kind, storage_dtype(precision)).to(memory_format=format)


def _drop_ins(
    model: Any,
    backend: str,
    levels: Sequence[str],
    precision: str,
    skipped: dict[Skipped, None],
) -> dict[str, Any]:
    """The model at each level, by its name; a level that cannot be goes to `skipped`."""
    from r18.torch import optimize_resnet18

    found: dict[str, Any] = {}
    for level in levels:
        try:
            # At this level PyTorch's own convolutions decide, by `_switches`.
            asked = None if level == "add_relu" else precision
            found[level] = optimize_resnet18(model, level, asked, backend)
        except NoKernel as error:
            skipped[Skipped(level, str(error).splitlines()[0])] = None
    return found


def _like_weights(torch: Any, array: Array, model: Any) -> Any:
    """Images on the model's device, in its dtype and memory format."""
    weight = model.conv1.weight
    nhwc = weight.is_contiguous(memory_format=torch.channels_last)
    images = torch.from_numpy(array).to(weight.device, weight.dtype)
    return images.to(memory_format=torch.channels_last if nhwc else torch.contiguous_format)


# -- judging -----------------------------------------------------------------------------------


def _losses(
    torch: Any,
    judge: Judge,
    calls: Mapping[str, Any],
    model: Any,
    backend: str,
    precision: str,
    batch: int,
) -> dict[str, float]:
    """Each contender's loss as a fraction of the allowed."""

    def run_of(call: Any) -> Callable[[Array], Array]:
        def run(images: Array) -> Array:
            logits: Array = call(_like_weights(torch, images, model)).double().cpu().numpy()
            return logits

        return run

    # Where PyTorch convolves, no kernel of the backend sums anything.
    own = {
        k.contract.algorithm
        for k in get_backend(backend).kernels()
        if k.precision.name == precision
    }
    return {
        name: judge(
            name,
            batch,
            run_of(call),
            "none" if name == MODEL else name,
            () if name in (MODEL, "add_relu") else own,
        )
        for name, call in calls.items()
    }


def _take_wrong(calls: dict[str, Any], losses: Mapping[str, float], batch: int) -> list[Skipped]:
    """Take the levels that are wrong out of `calls`; returns them with the reason."""
    found = []
    for name, loss in losses.items():
        if not loss <= 1:
            said = f"it loses {loss:.3g} times what it may against float64 at batch {batch}"
            if name == MODEL:
                raise R18Error(f"torchvision's module is wrong itself: {said}")
            del calls[name]
            found.append(Skipped(name, f"its output is wrong: {said}"))
    return found


# -- runs --------------------------------------------------------------------------------------


def _rounds(
    torch: Any,
    calls: Mapping[str, Any],
    images: Any,
    repeat: int,
    progress: Callable[[str], None],
) -> dict[str, list[_Run]]:
    """`repeat` profiled runs of each contender, in turns."""
    where = f"batch {len(images)}: "
    for name, call in calls.items():
        progress(where + name)
        for _ in range(WARM_UP):
            call(images)
    runs: dict[str, list[_Run]] = {name: [] for name in calls}
    names = list(calls)
    for round_ in range(repeat):
        for place in rotated(len(names), round_):
            name = names[place]
            progress(where + name)
            runs[name].append(_profiled(torch, calls[name], images))
    return runs


def _profiled(torch: Any, call: Any, images: Any) -> _Run:
    profiler = torch.profiler
    kinds = [profiler.ProfilerActivity.CPU]
    if images.is_cuda:
        kinds.append(profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    once = profiler.schedule(wait=0, warmup=1, active=1)
    with profiler.profile(activities=kinds, schedule=once) as found:
        call(images)
        if images.is_cuda:
            torch.cuda.synchronize()
        found.step()  # what comes now is recorded
        with profiler.record_function(_MARK):
            call(images)
        if images.is_cuda:
            torch.cuda.synchronize()  # outside of the mark, inside of the profile
    on_host = torch.autograd.DeviceType.CPU
    cpu = cuda = 0.0
    for event in found.events():
        if event.device_type != on_host:
            # A mark has a shadow on the GPU, from its first kernel to its last.
            shadow = event.name == _MARK or event.name.startswith(_STEP)
            cuda += 0 if shadow else event.time_range.elapsed_us()
        elif event.name == _MARK:
            cpu += event.time_range.elapsed_us()
    if images.is_cuda and not cuda:
        raise BackendUnavailable(
            "torch.profiler",
            "it recorded nothing that ran on the GPU",
            "The driver may allow GPU counters only to administrators, or another profiler runs.",
        )
    return _Run(cpu / 1e3, cuda / 1e3 if images.is_cuda else None, found)


def _rows(batch: int, runs: Mapping[str, Sequence[_Run]], losses: Mapping[str, float]) -> list[Row]:
    """The best of each column, and how it compares."""
    cpu = {name: min(run.cpu_ms for run in found) for name, found in runs.items()}
    cuda = {
        name: min((run.cuda_ms for run in found if run.cuda_ms is not None), default=None)
        for name, found in runs.items()
    }

    def ratio(name: str) -> float | None:
        mine, models = cuda[name], cuda[MODEL]
        return mine / models if mine is not None and models else None

    return [
        Row(
            name,
            batch,
            cpu[name],
            cuda[name],
            cpu[name] / cpu[MODEL],
            ratio(name),
            losses.get(name),
        )
        for name in runs
    ]


def _write_traces(folder: Path, batch: int, runs: Mapping[str, Sequence[_Run]]) -> None:
    for name, found in runs.items():
        best = min(found, key=lambda run: run.decisive_ms)
        with new_file(folder / f"{name}-batch{batch}.json") as draft:
            best.profiler.export_chrome_trace(str(draft))


__all__ = ["BATCHES", "LEVELS", "MODEL", "PRECISIONS", "Report", "Row", "Skipped", "profile"]
