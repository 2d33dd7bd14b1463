"""The CuPy backend on a GPU: programs, streams, arrays that stay on the device.

That its kernels are right is the oracle's to say (`r18 verify --backend cupy`, and the
differential tests with `R18_BACKEND=cupy`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from r18.backend import FUSION_LEVELS, CompileOptions
from r18.errors import BackendUnavailable, ShapeError, UsageError
from r18.executor import Tensor
from r18.passes import fuse
from r18.schedule import tiny
from r18_cupy import Backend
from support import Array, images, random_weights

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
    """The input is written late in the caller's stream, and the result read right behind it."""
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


def test_torch_tensors_go_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    program = compile_tiny()
    batch = images(SCHEDULE, BATCH, 11)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        device = torch.from_numpy(batch).cuda()
        out = torch.from_dlpack(program.run(device, stream)).clone()
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
