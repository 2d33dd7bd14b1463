"""A bfloat16 convolution fused with its max-pooling has the bits of the two ops in turn."""

from __future__ import annotations

from itertools import product

import numba
import numpy as np
import pytest
from pooled_windows import POOLS, WINDOWS

from r18.backend import CompileOptions, Kernel
from r18.graph.ops import Conv2d, ConvMaxPool, MaxPool2d, Problem, Shape
from r18.graph.resnet import resnet18
from r18.runtime.launch import run_kernel
from r18.runtime.plan import make_plan
from r18_numba_cpu import Backend, compiled
from r18_numba_cpu.bfloat16 import conv_maxpool
from r18_numba_cpu.conv_maxpool import MADE_NBYTES
from r18_numba_cpu.integers.packing import AMX, PORTABLE
from r18_oracle.generate.inputs import make_case

KERNELS = [kernel for kernel in Backend().kernels() if kernel.op is ConvMaxPool]
STEM = ConvMaxPool(
    Conv2d(3, 64, (7, 7), stride=(2, 2), padding=(3, 3), bias=True, relu=True),
    MaxPool2d((3, 3), (2, 2), (1, 1)),
)

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)


pytestmark = pytest.mark.usefixtures("only_where_it_runs")


@pytest.fixture(scope="module")
def backend(backend_with_tiles: Backend) -> Backend:
    return backend_with_tiles


def apart(backend: Backend, kernel: Kernel, problem: Problem, threads: int) -> None:
    """On `threads` threads the kernel has the bits of the two ops, run one after the other."""
    case = make_case(kernel, problem, "normal", 0)
    kernels = {one.id: one for one in backend.kernels()}
    conv = kernels[kernel.id.replace(ConvMaxPool.name, Conv2d.name)]
    pool = kernels["numba-cpu/maxpool2d/direct/bf16"]
    op = problem.op
    assert isinstance(op, ConvMaxPool)
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        got = run_kernel(backend, kernel, problem, *case.inputs, *case.weights)
        middle = Problem(op.conv, problem.inputs)
        made = run_kernel(backend, conv, middle, *case.inputs, *case.weights)
        wanted = run_kernel(backend, pool, Problem(op.pool, (made.shape,)), made)
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))


@each_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_block_before_are_kept(backend: Backend, kernel: Kernel, threads: int) -> None:
    if threads > compiled.most_threads():
        pytest.skip("Numba has one thread here")
    for index, (pool, (k, s, p), samples) in enumerate(product(POOLS, WINDOWS, (1, 3))):
        conv = Conv2d(1 + index % 4, 33, (k, k), (s, s), (p, p), bias=True, relu=index % 2 == 0)
        image = (samples, conv.in_channels, 23, 21)
        apart(backend, kernel, Problem(ConvMaxPool(conv, pool), (image,)), threads)


@each_kernel
def test_the_network_s_first_layers(backend: Backend, kernel: Kernel) -> None:
    apart(backend, kernel, Problem(STEM, ((2, 3, 224, 224),)), compiled.most_threads())


@pytest.mark.parametrize("group", [AMX, PORTABLE])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("samples", [1, 2, 3, 8])
def test_blocks_stay_in_the_cache_and_keep_threads_busy(
    group: int, threads: int, samples: int
) -> None:
    found = conv_maxpool.blocks(STEM, (samples, 224, 224, 3), group, threads)
    assert found.blocking.rows == (found.rows - 1) * 2 + 3
    assert found.blocking.rows * 112 * 64 * 2 <= MADE_NBYTES
    blocks = samples * -(-found.pool.out_h // found.rows)
    assert blocks > threads


def test_one_row_is_a_block_where_no_more_fit() -> None:
    wide: Shape = (1, 9, 9000, 3)
    found = conv_maxpool.blocks(STEM, wide, AMX, 1)
    assert (found.rows, found.blocking.rows) == (1, 3)


def test_a_plan_has_it_for_the_first_layers(backend: Backend) -> None:
    plan = make_plan(backend, resnet18(), CompileOptions(precision="bf16"))
    ending = "_amx" if any(k.algorithm.endswith("_amx") for k in KERNELS) else ""
    assert plan.steps[0].kernel.id == (
        f"numba-cpu/conv2d_maxpool2d/implicit_gemm{ending}/bf16/from_nchw"
    )
