"""Batches from host memory: every output is its own batch's, however copies and runs go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, cycle
from typing import Any

import numpy as np
import pytest

import r18_numpy
from cuda_streams import PROGRAM, Deferred, Device, Program, Stream, cupy_on
from r18.backend import CompileOptions
from r18.backend import Program as Running
from r18.errors import ProgramClosed, UsageError
from r18.graph.ops import GlobalAvgPool, Normalize, ReLU
from r18.graph.schedule import Schedule, Step
from r18.runtime.pipeline import pipeline
from r18.runtime.plan import make_plan
from support import Array

SHORT = Schedule(
    "short",
    (3, 4, 5),
    (Step("relu", ReLU(), ("image",), "relu"), Step("gap", GlobalAvgPool(), ("relu",), "gap")),
    (),
)
PIXELS = CompileOptions(2, pixels=Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
FLOATS = CompileOptions(2)
BATCHES = 7
SEEDS = range(40)


def batches(options: CompileOptions) -> list[Array]:
    rng = np.random.default_rng(0)
    shape = (options.batch, *SHORT.input_shape)
    if options.pixels is None:
        return [rng.standard_normal(shape, np.float32) for _ in range(BATCHES)]
    return [rng.integers(0, 256, shape, np.uint8) for _ in range(BATCHES)]


def plain(options: CompileOptions) -> Running:
    backend = r18_numpy.Backend()
    return Running(backend, make_plan(backend, SHORT, options), {})


def on_device(seed: int, options: CompileOptions, patch: pytest.MonkeyPatch) -> Program:
    device = Device(seed)
    patch.setattr(PROGRAM, "cupy", cupy_on(device))
    backend = Deferred(device)
    return Program(backend, make_plan(backend, SHORT, options), {})


def filled(arrays: Iterable[Array], given: Iterable[Array]) -> Iterator[Array]:
    """Yield the arrays in turn, each filled with the next batch."""
    for array, batch in zip(arrays, given, strict=False):
        array[...] = batch
        yield array


def spoilt(given: Iterable[Array]) -> Iterator[Array]:
    """Yield each batch in an array that is overwritten as soon as that is allowed."""
    for batch in given:
        own = batch.copy()
        yield own
        own[...] = 77


def same(got: Iterable[Array], expected: list[Array]) -> bool:
    found = list(got)
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("options", [PIXELS, FLOATS], ids=["pixels", "floats"])
def test_a_program_on_the_host_goes_from_batch_to_batch(options: CompileOptions) -> None:
    program, given = plain(options), batches(options)
    expected = [program(batch) for batch in given]
    arrays = program.input_arrays()
    assert program.input_arrays() is arrays
    others = plain(options).input_arrays()
    assert not any(np.shares_memory(*pair) for pair in combinations((*arrays, *others), 2))
    assert {(a.shape, a.dtype) for a in arrays} == {(given[0].shape, given[0].dtype)}
    assert same(pipeline(program, filled(cycle(arrays), given)), expected)
    assert same(pipeline(program, spoilt(given)), expected)
    assert list(pipeline(program, [])) == []
    program.close()
    with pytest.raises(ProgramClosed):
        program.input_arrays()
    with pytest.raises(ProgramClosed):
        program.fetch_later()


def test_pixels_lie_as_decoders_give_them() -> None:
    for array in plain(PIXELS).input_arrays():
        assert array.transpose(0, 2, 3, 1).flags.c_contiguous
    for array in plain(FLOATS).input_arrays():
        assert array.flags.c_contiguous


@pytest.mark.parametrize("options", [PIXELS, FLOATS], ids=["pixels", "floats"])
def test_a_mask_is_refused_and_not_dropped(
    options: CompileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A masked array is refused on the host and by cupy's `load`; the next batch is right."""
    (batch, *_) = batches(options)
    masked = np.ma.masked_array(batch, mask=batch > 0)
    expected = plain(options)(batch)
    for program in (plain(options), on_device(0, options, monkeypatch)):
        with pytest.raises(UsageError, match="knows no mask: fill the masked array first"):
            program.load(masked)
        with pytest.raises(UsageError, match="knows no mask: fill the masked array first"):
            list(pipeline(program, [masked]))
        assert same(pipeline(program, [batch]), [expected])


# -- copies during compute ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [PIXELS, FLOATS], ids=["pixels", "floats"])
def test_no_batch_meets_another(options: CompileOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches stay apart, though arrays and buffers are refilled as soon as that is allowed."""
    given = batches(options)
    expected = [plain(options)(batch) for batch in given]
    for seed in SEEDS:
        program = on_device(seed, options, monkeypatch)
        arrays = program.input_arrays()
        assert same(pipeline(program, filled(cycle(arrays), given)), expected), seed
        assert same(pipeline(program, spoilt(given)), expected), seed
        assert same(far_ahead(program, filled(cycle(arrays), given)), expected), seed
        np.testing.assert_array_equal(program(given[3]), expected[3])
        program.close()


def test_every_way_of_loading_after_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads may mix own arrays in any order, other arrays, batches never run, and repeated runs."""
    given = batches(PIXELS)
    expected = [plain(PIXELS)(batch) for batch in given]
    for seed in SEEDS:
        rng = np.random.default_rng([1, seed])
        program = on_device(seed, PIXELS, monkeypatch)
        arrays = program.input_arrays()
        owed: list[tuple[int, Any]] = []
        busy = [False, False]  # whether an array's copy may be going on
        for _ in range(30):
            which, how = int(rng.integers(BATCHES)), int(rng.integers(3))
            if how < 2 and not busy[how]:
                arrays[how][...] = given[which]
                program.load(arrays[how])
                busy[how], busy[1 - how] = True, False
            else:
                own = given[which].copy()
                program.load(own)
                own[...] = 33
            for _ in range(rng.choice([0, 1, 1, 1, 2])):
                program.launch()
                owed.append((which, program.fetch_later()))
            while owed and rng.random() < 0.5:
                index, fetch = owed.pop(int(rng.integers(len(owed))))
                np.testing.assert_array_equal(fetch(), expected[index], err_msg=str(seed))
        program.load(given[0])
        np.testing.assert_array_equal(program.fetch("pixels"), given[0])
        for index, fetch in owed:
            np.testing.assert_array_equal(fetch(), expected[index], err_msg=str(seed))


def far_ahead(program: Running, given: Iterable[Array]) -> list[Array]:
    """The outputs of all batches, each loaded and launched before any output is fetched."""
    owed = []
    for images in given:
        program.load(images)  # type: ignore[attr-defined]
        program.launch()  # type: ignore[attr-defined]
        owed.append(program.fetch_later())
    return [fetch() for fetch in owed]


@pytest.mark.parametrize("missing", ["copy_waits", "run_waits", "array_waits", "fetch_in_order"])
def test_without_one_of_the_waits_batches_meet(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one of the waits batches mix, so each is needed and these tests would notice."""
    given = batches(PIXELS)
    expected = [plain(PIXELS)(batch) for batch in given]
    failures = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            program: Any = on_device(seed, PIXELS, patch)
            arrays = program.input_arrays()
            if missing == "copy_waits":
                program._copies.wait_event = lambda event: None
            elif missing == "run_waits":
                program._cuda.wait_event = lambda event: None
            elif missing == "array_waits":
                for slot in program._slots:
                    slot.ready.synchronize = lambda: None
            else:
                copies = Stream(program._cuda.device)
                move = type(program._arena).copy_to_host_async
                patch.setattr(
                    type(program._arena),
                    "copy_to_host_async",
                    lambda self, at, n, stream, move=move, other=copies: move(self, at, n, other),
                )
            failures += not same(far_ahead(program, filled(cycle(arrays), given)), expected)
    assert failures
