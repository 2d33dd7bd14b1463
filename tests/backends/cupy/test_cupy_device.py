"""The CuPy backend on a GPU: programs, streams, arrays that stay on the device.

That its kernels are right is the oracle's to say (`r18 verify --backend cupy`, and the
differential tests with `R18_BACKEND=cupy`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from r18.backend import CompileOptions, Tensor
from r18.errors import BackendUnavailable, ShapeError, UsageError
from r18.graph.ops import Add, Normalize, Problem
from r18.graph.passes import FUSION_LEVELS, fuse
from r18.graph.precision import FP32
from r18.graph.resnet import resnet18, tiny
from r18.images.preprocess import Preprocess
from r18.runtime.launch import run_kernel
from r18.runtime.pipeline import pipeline
from r18.weights import load_weights
from r18_cupy import Backend
from r18_cupy.cuda.launch import GridLaunch
from r18_cupy.ops.elementwise import AddKernel
from r18_oracle.check.checks import Examination
from r18_oracle.check.tally import Tally
from r18_oracle.findings import Failed
from r18_oracle.network.checkpoints import compare_checkpoints, seeded_pixels
from support import Array, bytes_of, images, random_weights

BATCH = 3
SCHEDULE = tiny()
WEIGHTS = random_weights(SCHEDULE)
PRECISIONS = ("fp32", "tf32", "fp16x3", "fp16", "bf16")


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    try:
        Backend().probe()
    except BackendUnavailable as error:
        pytest.skip(f"needs a GPU: {error.cause}")


@pytest.fixture(params=PRECISIONS)
def program(request: pytest.FixtureRequest) -> Iterator[Any]:
    compiled = compile_tiny(precision=request.param)
    yield compiled
    compiled.close()


def compile_tiny(**options: Any) -> Any:
    return Backend().compile(SCHEDULE, WEIGHTS, CompileOptions(batch=BATCH, **options))


def input_of(program: Any) -> Tensor:
    return cast(Tensor, program.plan.tensors[program.plan.schedule.input])


def stored(batch: Array, program: Any) -> Any:
    """A batch on the device, in the program's storage format."""
    import cupy

    return cupy.asarray(batch.astype(input_of(program).dtype))


@pytest.mark.parametrize("level", FUSION_LEVELS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_taps_and_arena_change_no_bit(precision: str, level: str) -> None:
    batch = images(SCHEDULE, BATCH)
    expected = compile_tiny(precision=precision, fusion=level)(batch)
    assert np.isfinite(expected).all()
    taps = tuple(point.name for point in fuse(SCHEDULE, level).checkpoints)
    for change in ({"graph": False}, {"arena": False}, {"taps": taps}):
        got = compile_tiny(precision=precision, fusion=level, **change)(batch)
        np.testing.assert_array_equal(got, expected, err_msg=str(change))


def test_the_next_batch_is_loaded_while_one_is_computed(program: Any) -> None:
    first, second, third = (images(SCHEDULE, BATCH, seed) for seed in (1, 2, 3))
    alone = [program(batch) for batch in (first, second, third)]
    program.load(first)
    program.launch()
    program.load(second)
    np.testing.assert_array_equal(program.fetch(), alone[0])
    program.launch()
    program.load(third)
    program.launch()
    np.testing.assert_array_equal(program.fetch(), alone[2])
    assert not np.array_equal(alone[1], alone[2])


def test_an_array_on_the_device_is_read_where_it_is(program: Any) -> None:
    import cupy

    batch = images(SCHEDULE, BATCH, 4)
    device = stored(batch, program)
    expected = program(batch)
    out = program.run(device)
    assert isinstance(out, cupy.ndarray)
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(out.get().astype(np.float32), expected)
    assert program._held[1].data.ptr == device.data.ptr  # no copy was made


def test_run_is_ordered_in_the_callers_stream(program: Any) -> None:
    """A run waits for the caller's late input, and the caller's stream reads its result."""
    import cupy

    batches = [images(SCHEDULE, BATCH, seed) for seed in range(5, 10)]
    expected = [program(batch) for batch in batches]
    caller = cupy.cuda.Stream(non_blocking=True)
    slow = cupy.random.default_rng(0).random((2048, 2048), dtype=np.float32)
    cupy.cuda.get_current_stream().synchronize()
    with caller:
        device = cupy.zeros(batches[0].shape, input_of(program).dtype)
        results = []
        for batch in batches:
            late = stored(batch, program)
            slow = slow @ slow / 1024
            device[...] = late
            results.append(program.run(device, caller).copy())
    caller.synchronize()
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_array_equal(got.get().astype(np.float32), want)


def test_torch_tensors_go_in_and_out(program: Any) -> None:
    """Torch tensors of the program's own type go in and out, even bfloat16, which NumPy lacks."""
    torch = pytest.importorskip("torch")
    batch = images(SCHEDULE, BATCH, 11)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        device = torch.from_numpy(batch).cuda().to(getattr(torch, input_of(program).dtype.name))
        out = torch.from_dlpack(program.run(device, stream)).float()
    stream.synchronize()
    np.testing.assert_array_equal(out.cpu().numpy(), program(batch))


def test_wrong_arrays_are_refused(program: Any) -> None:
    import cupy

    batch = images(SCHEDULE, BATCH)
    with pytest.raises(UsageError, match="on the host"):
        program.run(batch)
    with pytest.raises(ShapeError, match="its batch is fixed"):
        program.run(cupy.asarray(batch[:1]))
    with pytest.raises(UsageError, match="floating-point"):
        program.run(cupy.asarray(batch).astype(np.int32))
    with pytest.raises(UsageError, match="knows no mask"):
        program.load(np.ma.masked_array(batch, mask=True))


def test_launching_allocates_nothing(program: Any) -> None:
    import cupy

    program.load(images(SCHEDULE, BATCH))
    program.launch()
    program.load(images(SCHEDULE, BATCH))
    program.launch()
    program.synchronize()
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes(), pool.total_bytes()
    for _ in range(20):
        program.launch()
    assert (pool.used_bytes(), pool.total_bytes()) == before
    program.synchronize()


def test_threads_and_programs_do_not_disturb_each_other() -> None:
    programs = [compile_tiny(precision=precision) for precision in PRECISIONS]
    batches = [images(SCHEDULE, BATCH, seed) for seed in range(4)]
    expected = [[program(batch) for batch in batches] for program in programs]
    errors: list[str] = []

    def work(offset: int) -> None:
        for turn in range(20):
            p, b = (offset + turn) % len(programs), (offset * 3 + turn) % len(batches)
            if not np.array_equal(programs[p](batches[b]), expected[p][b]):
                errors.append(f"thread {offset}, turn {turn}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_profile_names_the_phases() -> None:
    program = compile_tiny(fusion="none", kernels={"conv2d": "cupy/conv2d/im2col/fp32"})
    program.load(images(SCHEDULE, BATCH))
    times = program.profile()
    assert {t.phase for t in times if "/im2col/" in t.kernel} == {"im2col", "gemm"}
    assert {"bn1", "relu"} <= {t.step for t in times}
    assert all(t.milliseconds > 0 for t in times)


# -- pixels ------------------------------------------------------------------------------------


PIXELS = Preprocess().normalize


@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_pixels_give_the_bits_of_the_image_that_they_make(precision: str, level: str) -> None:
    """A program without the first kernel gives the same bits from the image that it stores."""
    options = {"precision": precision, "fusion": level}
    program = compile_tiny(pixels=PIXELS, taps=("image",), **options)
    pixels = bytes_of(SCHEDULE, BATCH)
    got = program(pixels)
    image = program.fetch("image")
    mean, std = (np.array(values)[:, None, None] for values in (PIXELS.mean, PIXELS.std))
    unit = {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(precision, 2.0**-24)
    np.testing.assert_allclose(image, (pixels / 255 - mean) / std, rtol=unit, atol=2e-6)
    np.testing.assert_array_equal(program.fetch("pixels"), pixels)
    np.testing.assert_array_equal(compile_tiny(**options)(image), got)
    assert next(time.step for time in program.profile()) == "normalize"


@pytest.mark.parametrize("size", [224, 33, 30, 2])
@pytest.mark.parametrize("channels", [3, 1, 4])
def test_images_of_any_size_and_channels(size: int, channels: int) -> None:
    """Planes with and without a whole number of vectors, and any number of channels, are right."""
    op = Normalize((0.4, 0.5, 0.6, 0.7)[:channels], (0.2, 0.3, 0.4, 0.5)[:channels])
    backend = Backend()
    problem = Problem(op, ((2, channels, size, size),))
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, problem.output, np.uint8)
    mean, std = (np.array(values)[:, None, None] for values in (op.mean, op.std))
    for kernel in (k for k in backend.kernels() if k.op is Normalize):
        unit = 2.0**-8 if kernel.precision.storage == "bfloat16" else 2.0**-11
        got = run_kernel(backend, kernel, problem, pixels).astype(np.float64)
        np.testing.assert_allclose(got, (pixels / 255 - mean) / std, rtol=unit, atol=2e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_checkpoint_from_the_same_bytes(precision: str) -> None:
    report = compare_checkpoints(
        Backend(),
        SCHEDULE,
        load_weights("synthetic", SCHEDULE),
        seeded_pixels(SCHEDULE, 2, PIXELS),
        precision=precision,
        taps="all",
        pixels=PIXELS,
    )
    assert report.findings == ()
    assert report.steps[0].step == "normalize"


def test_pixels_on_the_device_are_read_where_they_are() -> None:
    import cupy

    program = compile_tiny(pixels=PIXELS)
    pixels = bytes_of(SCHEDULE, BATCH, 1)
    expected = program(pixels)
    device = cupy.asarray(np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)))
    out = program.run(device.transpose(0, 3, 1, 2))
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(out.get(), expected)
    assert program._held[1].data.ptr == device.data.ptr
    with pytest.raises(UsageError, match="takes uint8 pixels"):
        program.run(cupy.zeros(pixels.shape, np.float32))


# -- from host memory --------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("pixels", [PIXELS, None], ids=["pixels", "floats"])
def test_batches_from_host_memory_meet_none_of_the_others(
    pixels: Normalize | None, graph: bool
) -> None:
    """Host arrays that are refilled at once spoil no batch; ResNet-18 makes runs take a while."""
    schedule, batch = resnet18(), 16
    options = CompileOptions(batch, "fp16", pixels=pixels, graph=graph)
    program: Any = Backend().compile(schedule, load_weights("synthetic", schedule), options)
    make = images if pixels is None else bytes_of
    given = [make(schedule, batch, seed).astype(input_of(program).dtype) for seed in range(5)]
    expected = [program(one) for one in given]
    order = [int(i) for i in np.random.default_rng(0).integers(0, 5, 60)]
    arrays = program.input_arrays()
    assert program.input_arrays() is arrays

    def filled() -> Iterator[Array]:
        for turn, which in enumerate(order):
            array = arrays[turn % 2]
            array[...] = given[which]
            yield array

    def spoilt() -> Iterator[Array]:
        for which in order:
            own = given[which].copy()
            yield own
            own[...] = 0

    for source in (filled, spoilt):
        got = list(pipeline(program, source()))
        assert len(got) == len(order)
        for turn, which in enumerate(order):
            np.testing.assert_array_equal(got[turn], expected[which], err_msg=str(turn))
    owed = []
    for images_ in filled():  # far ahead of the device
        program.load(images_)
        program.launch()
        owed.append(program.fetch_later())
    for which, fetch in zip(order, owed, strict=True):
        np.testing.assert_array_equal(fetch(), expected[which])
    program.close()


def test_an_output_that_nobody_fetched_disturbs_no_other(program: Any) -> None:
    first, second = (images(SCHEDULE, BATCH, seed) for seed in (1, 2))
    expected = program(second)
    for _ in range(200):
        program.load(first)
        program.launch()
        program.fetch_later()  # dropped while the copy may be going on
        program.load(second)
        program.launch()
        np.testing.assert_array_equal(program.fetch_later()(), expected)


@dataclass(frozen=True, eq=False)
class Hasty(AddKernel):
    """A sum that may launch early although its function waits for nothing."""

    def launches(self, problem: Problem) -> tuple[GridLaunch, ...]:
        return tuple(replace(launch, overlaps=True) for launch in super().launches(problem))


@pytest.mark.parametrize("kind", [AddKernel, Hasty])
def test_a_kernel_that_does_not_wait_for_the_launch_before_is_caught(kind: type[AddKernel]) -> None:
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("launches overlap from compute capability 9.0 on")
    problem = Problem(Add(), ((2, 8, 16, 16), (2, 8, 16, 16)))
    backend, kernel = Backend(), kind(FP32)
    examined = Examination(backend, kernel, problem, 1, Tally(), "cupy")
    if kind is AddKernel:
        assert examined.run()
        assert examined.tally.passed["order"]
    else:
        with pytest.raises(Failed) as caught:
            examined.run()
        assert caught.value.finding.check == "order"
