"""LLVM's code for the kernels that multiply, and the rates of instructions."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

import emulated_tiles
import numpy as np
import pytest

from r18.backend import HostCode, Kernel
from r18.graph.ops import Conv2d, ConvMaxPool, Linear, MaxPool2d, Problem, ReLU
from r18.graph.quantized import Quantize, QuantizedConv2d, QuantizedConvMaxPool
from r18.inner_loops import Loop, inner_loops
from r18_numba_cpu import Backend, compiled, microbenchmarks
from r18_numba_cpu.assembly import host_code, instruction_of
from support import output_of

micro_kernel, jit, vector = (compiled.module(name) for name in ("micro_kernel", "jit", "vector"))
micro = compiled.module("microbenchmarks")
TILE = micro_kernel.ROWS * micro_kernel.VECTORS
WINDOW = Conv2d(16, 40, (3, 3), padding=(1, 1), bias=True)
CONV = Problem(WINDOW, ((1, 16, 8, 15),))
LINEAR = Problem(Linear(33, 40), ((15, 33),))
POOL = MaxPool2d((3, 3), (2, 2), (1, 1))
POOLED = Problem(ConvMaxPool(WINDOW, POOL), CONV.inputs)
INTEGERS = Problem(QuantizedConv2d(WINDOW, ("uint8",)), CONV.inputs)
STEM = Problem(
    QuantizedConvMaxPool(QuantizedConv2d(WINDOW, ("int8",)), POOL, Quantize()), CONV.inputs
)

only_on_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="what is read here is x86's"
)


@pytest.fixture(scope="module")
def backend() -> Backend:
    found = Backend()
    found.probe()
    return found


def kernel(backend: Backend, name: str) -> Kernel:
    found = {k.id.removeprefix("numba-cpu/"): k for k in backend.kernels()}
    if name not in found:
        pytest.skip(f"this CPU does not run {name}")
    return found[name]


def loops(backend: Backend, name: str, problem: Problem) -> tuple[Loop, ...]:
    code = backend.host_code(kernel(backend, name), problem)
    assert code is not None
    return inner_loops(code)


@only_on_x86
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("conv2d/implicit_gemm/fp32", CONV),
        ("conv2d/winograd_f4x4/fp32", CONV),
        ("linear/tiled/fp32", LINEAR),
        ("linear/tiled_avx512_bf16/bf16", LINEAR),
    ],
)
def test_inner_loops_are_one_step_of_a_tile_each(
    backend: Backend, name: str, problem: Problem
) -> None:
    """Inner loops are not unrolled: with twice the products, 12 rows would spill 19 registers."""
    found = loops(backend, name, problem)
    assert {loop.products for loop in found} >= {
        micro_kernel.VECTORS * rows for rows in range(1, micro_kernel.ROWS + 1)
    }
    assert found[0].products == TILE
    assert sum(loop.spills for loop in found) == 0
    register = {16: "zmm", 8: "ymm"}.get(vector.LANES, "xmm")
    products = [line for line in found[0].lines if line.split()[0].startswith(("vfmadd", "vdpbf"))]
    assert len(products) == TILE
    assert all(f"%{register}" in line for line in products)


@only_on_x86
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("qconv2d/implicit_gemm_vnni/int8", INTEGERS),
        ("qconv2d/implicit_gemm_avx2/int8", INTEGERS),
        ("qconv2d_maxpool2d/implicit_gemm_vnni/int8/from_nchw", STEM),
        ("conv2d/implicit_gemm_avx512_bf16/bf16", CONV),
        (
            "conv2d_maxpool2d/implicit_gemm_avx512_bf16/bf16",
            Problem(ConvMaxPool(WINDOW, POOL), CONV.inputs),
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_tile_is_inlined_and_its_rows_follow_each_other(
    backend: Backend, name: str, problem: Problem
) -> None:
    code = backend.host_code(kernel(backend, name), problem)
    assert code is not None
    assert not re.search(r"^_ZN\S*(?:register_tile|pairs)\d+multiply", code.assembly, re.MULTILINE)
    largest = inner_loops(code)[0]
    assert largest.products == TILE
    assert largest.spills == 0
    if vector.LANES < 16:
        return  # there LLVM has too few registers to keep all pointers in them
    assert largest.reloads == 0
    steps = [line for line in largest.lines if re.match(r"\s*addq\s+%\w+, %\w+$", line)]
    assert len(steps) >= micro_kernel.ROWS - 2  # from a row's pointer to the next one's


def counting(assembly: str) -> Iterator[tuple[str, str]]:
    """The function and the label of each loop that changes a reference count.

    The loop over workers, which begins with its own arrays, is left out.
    """
    name, label, depth = "", "", 0
    for line in assembly.splitlines():
        if found := re.match(r"(\S+):", line):
            label, depth = found[1], 0
            name = name if label.startswith(".L") else label
        if "Child" not in line:
            depth = max(depth, *map(int, re.findall(r"Depth=(\d+)", line)), 0)
        if re.search(r"NRT_(?:inc|dec)ref", line) and depth > ("parfor" in name):
            yield name, label


@only_on_x86
@pytest.mark.parametrize(
    "name",
    [
        *("conv2d/implicit_gemm/fp32", "conv2d/im2col/fp32", "conv2d/winograd_f4x4/fp32"),
        *("conv2d/implicit_gemm/bf16", "conv2d/implicit_gemm_avx512_bf16/bf16"),
        *("qconv2d/implicit_gemm_vnni/int8", "qconv2d/implicit_gemm/int8"),
        "qconv2d_maxpool2d/implicit_gemm_vnni/int8/from_nchw",
    ],
)
def test_no_loop_counts_references(backend: Backend, name: str) -> None:
    """No loop counts references, since all threads would write to the same memory."""
    of_integers = {"qconv2d": INTEGERS, "qconv2d_maxpool2d": STEM}
    code = backend.host_code(kernel(backend, name), of_integers.get(name.split("/")[0], CONV))
    assert code is not None
    assert "Depth=2" in code.assembly, "LLVM's comments say which loop is in which"
    assert not list(counting(code.assembly))


def test_code_is_compiled_and_nothing_is_computed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "assembly", lambda function, given: f"{function.py_func.__name__}")
    fused = kernel(backend, "conv2d/winograd_f4x4/fp32")
    assert host_code(fused, CONV).assembly == "winograd_fused"  # type: ignore[union-attr]
    (large, _) = fused.extra_problems
    monkeypatch.setattr("r18_numba_cpu.winograd.ROUND_NBYTES", 1)  # rounds of a tile: many calls
    assert host_code(fused, large).assembly == "winograd_nonfused"  # type: ignore[union-attr]
    relu = kernel(backend, "relu/maximum/fp32")
    assert host_code(relu, Problem(ReLU(), ((1, 2, 3, 4),))) is None
    with compiled.recorded() as outer, compiled.recorded() as inner:
        compiled.run(print, np.zeros((2, 3)))
    assert not outer
    assert [(function, given[0].shape) for function, given in inner] == [(print, (6,))]


def test_every_kernel_names_its_instruction() -> None:
    found = {k.id.removeprefix("numba-cpu/"): k for k in Backend().kernels()}
    named = {
        "conv2d/implicit_gemm_amx/bf16": "tdpbf16ps",
        "linear/tiled_avx512_bf16/bf16": "vdpbf16ps",
        "conv2d/winograd_f4x4/bf16": microbenchmarks.multiply_add(),
        "qconv2d/implicit_gemm/int8": microbenchmarks.multiply_add(),
        "conv2d/implicit_gemm/fp32": microbenchmarks.multiply_add(),
    }
    for name, instruction in named.items():
        assert instruction_of(found[name], CONV) == instruction
    for stored, by_amx in (("uint8", "tdpbusd"), ("int8", "tdpbssd")):
        op = QuantizedConv2d(Conv2d(4, 4, (1, 1), bias=True), (stored,))
        problem = Problem(op, ((1, 4, 2, 2),))
        assert instruction_of(found["qconv2d/implicit_gemm_amx/int8"], problem) == by_amx
        assert instruction_of(found["qconv2d/implicit_gemm_vnni/int8"], problem) == "vpdpbusd"
        by_words = instruction_of(found["qconv2d/implicit_gemm_avx2/int8"], problem)
        has_vnni = compiled.module("integers.dots").HAS_VNNI
        assert by_words == ("vpdpwssd" if has_vnni else "vpmaddwd")
        by_tiles = found["qconv2d_maxpool2d/implicit_gemm_amx/int8/from_nchw"]
        assert (
            instruction_of(by_tiles, Problem(QuantizedConvMaxPool(op, POOL), problem.inputs))
            == by_amx
        )
    assert instruction_of(by_tiles, STEM) == "tdpbssd"  # of an image in float32


# -- rates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", microbenchmarks.microbenchmarks(), ids=lambda one: one.what)
def test_a_microbenchmark_computes_its_products(one: microbenchmarks.Microbenchmark) -> None:
    """A microbenchmark computes its products, which are exact for factors of 1 and 2."""
    workers, turns = 2, 5
    factors, sums = microbenchmarks._factors(one), microbenchmarks._sums(one, workers)
    ones_and_twos = np.array([1, 2] * (factors.size // 2), np.float32)
    if one.factors is np.uint16:
        factors[:] = (ones_and_twos.view(np.uint32) >> 16).astype(np.uint16)
    else:
        factors[:] = ones_and_twos.astype(factors.dtype)
    if one.tiles:
        pytest.skip("verified with emulated tiles")
    before = sums.copy()
    compiled.run(micro.by_vectors, factors, sums, turns, workers)
    lanes = factors.size // 2 // one.elements
    each = (ones_and_twos[: factors.size // 2] ** 2).reshape(lanes, one.elements).sum(1)
    assert one.operations == 2 * micro.SUMS * lanes * one.elements
    expected = before.reshape(-1, lanes) + turns * each
    np.testing.assert_array_equal(sums.reshape(-1, lanes), expected)


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulated_tiles.used():
        cache = micro.by_tiles._cache
        micro.by_tiles._cache = emulated_tiles.Apart(cache)
        yield
        micro.by_tiles._cache = cache


def test_a_microbenchmark_of_tiles_computes_its_products(emulated: None) -> None:
    for one in microbenchmarks.microbenchmarks():
        if not one.tiles or one.factors is not np.uint8:
            continue
        factors, sums = microbenchmarks._factors(one), microbenchmarks._sums(one, 1)
        a, b = (part.reshape(2, 16, 16, 4).astype(np.int64) for part in np.split(factors, 2))
        b = b.astype(np.uint8).view(np.int8).reshape(2, 16, 16, 4).astype(np.int64)
        compiled.run(micro.by_tiles, factors, sums, 3, microbenchmarks.configuration(), 1)
        products = np.einsum("trgq,vgcq->tvrc", a, b).reshape(-1)
        np.testing.assert_array_equal(sums, 3 * products)
        assert one.operations == 2 * 4 * 16 * 16 * 64
        return
    pytest.fail("there is none")


@only_on_x86
@pytest.mark.parametrize("one", microbenchmarks.microbenchmarks(), ids=lambda one: one.what)
def test_a_microbenchmark_is_its_instruction_alone(one: microbenchmarks.Microbenchmark) -> None:
    kernels, given = compiled.module("microbenchmarks"), []
    if one.tiles:
        given, function = [microbenchmarks.configuration()], kernels.by_tiles
    else:
        function = kernels.by_vectors
    arguments = (microbenchmarks._factors(one), microbenchmarks._sums(one, 1), 1, *given, 1)
    loop = inner_loops(HostCode(one.what, jit.assembly(function, arguments)))[0]
    assert loop.products == (4 if one.tiles else micro.SUMS)
    body = [line.split()[0] for line in loop.lines if not line.endswith(":")]
    counted = [one.what, "vpaddd"] if one.what == "vpmaddwd" else [one.what]
    assert body.count("vpaddd") in (0, micro.SUMS)
    rest = [name for name in body if name not in counted]
    assert len(rest) <= 4, rest  # counting, and no vector is loaded
    assert not any("(" in line for line in loop.lines if one.what in line)


@only_on_x86
def test_tiles_are_repeated_without_loads() -> None:
    """Tile products repeat without loads, compiled for a Sapphire Rapids and not run."""
    assembly = output_of("""
import llvmlite.binding as binding
found = binding.get_host_cpu_features()
wanted = ("amx-tile", "amx-int8", "amx-bf16", "avx2", "fma", "bmi", "bmi2", "avx512f", "avx512bw",
          "avx512cd", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16")
found.update(dict.fromkeys(wanted, True))
binding.get_host_cpu_features = lambda: found
binding.get_host_cpu_name = lambda: "sapphirerapids"

import numpy as np
from r18_numba_cpu import compiled, microbenchmarks

for factors, sums in ((np.uint8, np.int32), (np.uint16, np.float32)):
    given = np.zeros(9, factors), np.zeros(9, sums), 1, microbenchmarks.configuration(), 1
    print(compiled.module("jit").assembly(compiled.module("microbenchmarks").by_tiles, given))
    print("=====")
""")
    texts = assembly.split("=====")[:2]
    for name, text in zip(("tdpbusd", "tdpbf16ps"), texts, strict=True):
        found = inner_loops(HostCode(name, text))
        assert found
        for loop in found:
            assert (loop.products, loop.spills, loop.reloads) == (4, 0, 0)
            order = [re.findall(r"%tmm(\d)", line) for line in loop.lines if name in line]
            assert sorted((int(c), int(a), int(b)) for b, a, c in order) == [
                (0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)
            ]  # fmt: skip
            assert loop.instructions <= 8
