"""A convolution of integers fused with its max pooling, and with what makes integers of its image,
has the bytes of these ops in turn.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import emulated_tiles
import numba
import numpy as np
import pytest
from pooled_windows import POOLS, WINDOWS

from integer_networks import images_of, integer_weights
from r18.backend import Array, CompileOptions, Kernel
from r18.graph.ops import Conv2d, MaxPool2d, Normalize, Problem
from r18.graph.passes import from_pixels, fuse
from r18.graph.quantize import quantized
from r18.graph.quantized import (
    Quantize,
    QuantizedConv2d,
    QuantizedConvMaxPool,
    QuantizedMaxPool2d,
    QuantizePixels,
)
from r18.graph.resnet import resnet18, tiny
from r18.images.preprocess import Preprocess
from r18.runtime.launch import run_kernel
from r18.runtime.plan import make_plan
from r18_numba_cpu import Backend, compiled
from r18_numba_cpu.conv_maxpool import MADE_NBYTES
from r18_numba_cpu.integers import conv_maxpool
from r18_numba_cpu.integers.packing import AMX, PORTABLE, VNNI
from r18_numpy import Backend as Numpy
from r18_oracle.generate.inputs import fewest_variants, make_case
from r18_oracle.ops.normalize import normalization

KERNELS = [kernel for kernel in Backend().kernels() if kernel.op is QuantizedConvMaxPool]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)

pytestmark = pytest.mark.usefixtures("only_where_it_runs")


@pytest.fixture(scope="module")
def backend(backend_with_tiles: Backend) -> Backend:
    return backend_with_tiles


def image_ops(channels: int) -> tuple[Quantize | QuantizePixels | None, ...]:
    return None, Quantize(), QuantizePixels(normalization(channels))


def in_turn(problem: Problem, inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """The bytes of the ops one after the other, by NumPy's kernels, (N, C, H, W)."""
    backend = Numpy()
    kernels = {kernel.op: kernel for kernel in backend.kernels()}
    op = problem.op
    assert isinstance(op, QuantizedConvMaxPool)
    value, shape = inputs[0], problem.inputs[0]
    if op.image is not None:
        made = Problem(op.image, (shape,))
        value = run_kernel(backend, kernels[type(op.image)], made, value, *weights[3:])
    conv = Problem(op.conv, (shape,))
    value = run_kernel(backend, kernels[QuantizedConv2d], conv, value, *weights[:3])
    pool = Problem(QuantizedMaxPool2d(op.pool, op.output_storage), (conv.output,))
    return run_kernel(backend, kernels[QuantizedMaxPool2d], pool, value)


def assert_equal(
    backend: Backend,
    kernel: Kernel,
    problem: Problem,
    threads: int = 1,
    kind: str = "normal",
    variant: int = 0,
) -> None:
    case = make_case(kernel, problem, kind, 0, variant)
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        got = run_kernel(backend, kernel, problem, *case.inputs, *case.weights)
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(got, in_turn(problem, case.inputs, case.weights))


@each_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_block_before_are_kept(backend: Backend, kernel: Kernel, threads: int) -> None:
    if threads > compiled.most_threads():
        pytest.skip("Numba has one thread here")
    kinds = cycle(("normal", "edges"))
    for index, (pool, (k, s, p), samples) in enumerate(product(POOLS, WINDOWS, (1, 3))):
        channels = 1 + index % 4
        conv = Conv2d(channels, 33, (k, k), (s, s), (p, p), bias=True, relu=index % 2 == 0)
        ints = QuantizedConv2d(conv, ("int8",))
        image = image_ops(channels)[index % 3]
        problem = Problem(QuantizedConvMaxPool(ints, pool, image), ((samples, channels, 23, 21),))
        kind = next(kinds)
        variant = index % fewest_variants(kernel, problem, kind)
        assert_equal(backend, kernel, problem, threads, kind, variant)


@each_kernel
@pytest.mark.parametrize("image", [0, 1, 2], ids=["int8", "numbers", "pixels"])
def test_the_network_s_first_layers(backend: Backend, kernel: Kernel, image: int) -> None:
    conv = Conv2d(3, 64, (7, 7), stride=(2, 2), padding=(3, 3), bias=True, relu=True)
    op = QuantizedConvMaxPool(QuantizedConv2d(conv, ("int8",)), POOLS[0], image_ops(3)[image])
    assert_equal(backend, kernel, Problem(op, ((2, 3, 224, 224),)), compiled.most_threads())


@each_kernel
def test_rows_of_every_width_are_interleaved(backend: Backend, kernel: Kernel) -> None:
    """A row of three planes is interleaved a vector of pixels at a time, the last one in part."""
    conv = Conv2d(3, 8, (1, 1), bias=True)
    for width, image in product(range(1, 36), image_ops(3)[:2]):
        op = QuantizedConvMaxPool(
            QuantizedConv2d(conv, ("int8",)), MaxPool2d((1, 1), (1, 1)), image
        )
        assert_equal(backend, kernel, Problem(op, ((1, 3, 2, width),)))


@each_kernel
def test_a_window_may_see_only_padding(backend: Backend, kernel: Kernel) -> None:
    """Unsigned bytes skip kernel rows above and below the image; signed ones do not."""
    for stored, pad in product(("uint8", "int8"), (2, 3)):
        conv = Conv2d(4, 33, (3, 3), padding=(pad, pad), bias=True, relu=True)
        op = QuantizedConvMaxPool(QuantizedConv2d(conv, (stored,)), POOLS[1])
        assert_equal(backend, kernel, Problem(op, ((2, 4, 2, 5),)))


@each_kernel
def test_groups_and_dilation(backend: Backend, kernel: Kernel) -> None:
    conv = Conv2d(4, 34, (3, 2), (2, 1), (2, 1), bias=True, relu=True, groups=2, dilation=(2, 1))
    for image in image_ops(4):
        op = QuantizedConvMaxPool(QuantizedConv2d(conv, ("int8",)), POOLS[0], image)
        assert_equal(backend, kernel, Problem(op, ((2, 4, 11, 9),)))


@pytest.mark.parametrize("group", [AMX, VNNI, PORTABLE])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_blocks_stay_in_the_cache_and_keep_threads_busy(
    group: int, threads: int, samples: int
) -> None:
    conv = Conv2d(3, 64, (7, 7), stride=(2, 2), padding=(3, 3), bias=True, relu=True)
    op = QuantizedConvMaxPool(QuantizedConv2d(conv, ("int8",)), POOLS[0], Quantize())
    found = conv_maxpool.blocks(op, (samples, 224, 224, 3), group, threads)
    assert found.blocking.rows == (found.rows - 1) * 2 + 3
    assert found.blocking.rows * 112 * 64 <= MADE_NBYTES
    assert samples * -(-found.pool.out_h // found.rows) > threads


@pytest.mark.skipif(compiled.module("amx").AVAILABLE, reason="this CPU has AMX")
def test_code_of_tiles_is_kept_for_other_processes(backend: Backend) -> None:
    """Code with tiles is cached for other processes; Numba caches none that holds an address."""
    (by_tiles,) = (kernel for kernel in KERNELS if kernel.algorithm.endswith("_amx"))
    conv = QuantizedConv2d(Conv2d(3, 8, (1, 1), bias=True), ("int8",))
    assert_equal(backend, by_tiles, Problem(QuantizedConvMaxPool(conv, POOLS[1]), ((1, 3, 2, 2),)))
    assert emulated_tiles.kept(compiled.module("integers.conv_maxpool").conv_maxpool)


def test_a_plan_has_it_from_the_image_on(backend: Backend) -> None:
    schedule = quantized(fuse(resnet18(), "all"))
    options = CompileOptions(precision="int8")
    stem = make_plan(backend, schedule, options).steps[0]
    assert stem.kernel.op is QuantizedConvMaxPool
    assert isinstance(stem.problem.op.image, Quantize)
    pixels = Normalize((0.5,) * 3, (0.25,) * 3)
    of_pixels = make_plan(backend, from_pixels(schedule, pixels), options).steps[0]
    assert isinstance(of_pixels.problem.op.image, QuantizePixels)


@each_kernel
@pytest.mark.parametrize("pixels", [False, True])
def test_a_network_with_it_equals_numpys(backend: Backend, kernel: Kernel, pixels: bool) -> None:
    integers = quantized(fuse(tiny(), "all"))
    images = images_of(tiny(), 3)
    weights = integer_weights(tiny(), images, 8)
    options = CompileOptions(precision="int8", batch=3)
    if pixels:
        options = replace(options, pixels=Preprocess().normalize)
        images = np.random.default_rng(3).integers(0, 256, images.shape).astype(np.uint8)
    expected = Numpy().compile(integers, weights, options)(images)
    assert np.unique(expected).size > 1
    chosen = replace(options, kernels={QuantizedConvMaxPool.name: kernel.id})
    program = backend.compile(integers, weights, chosen)
    assert program.plan.steps[0].kernel is kernel
    np.testing.assert_array_equal(program(images), expected)


def test_an_image_that_is_quantised_has_the_scale_as_its_last_weight() -> None:
    conv = QuantizedConv2d(Conv2d(3, 8, (1, 1), bias=True), ("int8",))
    op = QuantizedConvMaxPool(conv, MaxPool2d((1, 1), (1, 1)))
    with_image = replace(op, image=Quantize())
    assert [w.role for w in with_image.weights()][-1] == "scale"
    assert len(op.weights()) == len(with_image.weights()) - 1
