"""The parts of the demonstration, in order: classes, a planted bug, speed, and what took the time.

PyTorch and the oracle are imported in a second process while this one classifies. This one waits
for its verdict before anything is timed, so that nothing else runs during the timing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from threadpoolctl import threadpool_limits

from r18.backend import CompileOptions, DeviceInfo, Program
from r18.backend.registry import get_backend, title
from r18.demo.heavy import Heavy
from r18.demo.part import Part, Request
from r18.demo.second import Second
from r18.demo.speed import images_for, speed
from r18.errors import WeightsError
from r18.graph.resnet import network
from r18.graph.schedule import Schedule
from r18.images.classify import classify
from r18.machine import keep_freed_memory
from r18.stopwatch import part
from r18.weights import Weights, load_weights
from r18.weights.sources import imagenet_weights

PICTURE = Path(__file__).with_name("orange.jpg")
"""An orange, 400×320; `tools/draw_demo_picture.py` draws it."""
DOWNLOAD_SECONDS = 20.0
"""A slower download of ImageNet's weights is given up."""
TOP = 5


def demo(request: Request) -> Iterator[Part]:
    """The parts, each as soon as it is there.

    Raises what compiling the network on a named backend raises, `WeightsError` for weights that
    were asked for and are not there, and `R18Error` if the second process fails.
    """
    begin = time.perf_counter()
    keep_freed_memory()
    schedule = network(request.network)
    with part("second process started"):
        second = Second(Heavy)
    with closing(second):
        second.ask("bug")
        with part("weights"), threadpool_limits(1, user_api="blas"):  # the other core is busy
            weights, why = _weights(request.weights, schedule)
        with part("backend found and probed"):
            backend = get_backend(request.backend)
            device = backend.probe()
        with part("network compiled"):
            program = backend.compile(schedule, weights, CompileOptions())
        with closing(program):
            classes = _classes(program, title(backend), device, weights, why)
            yield replace(classes, seconds=time.perf_counter() - begin)
            images = images_for(schedule)
            with part("waiting for the second process"):
                second.ask("make", device.kind, schedule, dict(weights), images)
                found: Part = second.answer()
            yield found
            gc.freeze()  # memory is measured after collections, which need not look at all of this
            yield _timed("speed", lambda: speed(request.backend, device, program, images, second))
        yield _meanwhile(second.seconds())


def _timed(name: str, make: Callable[[], Part]) -> Part:
    begin = time.perf_counter()
    with part(name):
        made = make()
    return replace(made, seconds=time.perf_counter() - begin)


def _meanwhile(rows: list[tuple[str, float]]) -> Part:
    """The part about the second process."""
    width = max(len(name) for name, _ in rows)
    lines = tuple(f"{name:{width}}  {seconds:8.3f}" for name, seconds in rows[:-1])
    data = {"parts": {name: round(seconds, 3) for name, seconds in rows[:-1]}}
    return Part("in a second process", lines, rows[-1][1], data=data)


def _weights(asked: str, schedule: Schedule) -> tuple[Weights, str]:
    """The weights, and why they are not ImageNet's if the user named no others."""
    if asked:
        return load_weights(asked, schedule), ""
    try:
        return imagenet_weights(schedule, DOWNLOAD_SECONDS), ""
    except WeightsError as error:
        return load_weights("synthetic", schedule), str(error).splitlines()[0]


def _classes(
    program: Program, backend: str, device: DeviceInfo, weights: Weights, why: str
) -> Part:
    """The classes of the picture. backend: its title. why: as `_weights` gives it."""
    schedule = program.plan.schedule
    top = min(TOP, program.plan.tensors[schedule.output].shape[-1])
    (result,) = classify(program, [PICTURE], weights.preprocess, top=top)
    lines = [
        f"{PICTURE.name}, a drawn picture: {schedule.name} on {backend}, {device}",
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
        "backend": program.plan.backend,
        "device": device.name,
        "weights": weights.source,
        "top": [asdict(guess) for guess in result.top],
    }
    return Part(f"the {top} most probable classes", tuple(lines), data=data)


__all__ = ["DOWNLOAD_SECONDS", "PICTURE", "demo"]
