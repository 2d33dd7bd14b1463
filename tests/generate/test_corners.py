"""Corners: every op has some, they are small, and they have the extents that they claim."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from r18.backend.registry import load_backend
from r18.graph.all_ops import ALL_OPS
from r18.graph.ops import Conv2d, Linear, MatMul, MaxPool2d, Op, Relayout, Softmax
from r18.graph.precision import INT8
from r18.graph.quantized import (
    MOST_DEPTH,
    MOST_SUM,
    QuantizedConv2d,
    QuantizedLinear,
)
from r18_cupy.bytes.stem_wgmma import STAGES
from r18_oracle.generate.corners import corners
from r18_oracle.generate.crossings import crossings
from r18_oracle.generate.inputs import make_case
from r18_oracle.generate.sizes import GRID
from r18_oracle.ops.integers import qconv2d, qlinear
from r18_oracle.ops.integers.spec import pairwise
from r18_oracle.search.profiles import profile

QUICK = profile("quick")


def quick(op: type[Op]) -> list[Op]:
    return [p.op for p in corners(op, QUICK.max_elements, QUICK.max_macs)]


@pytest.mark.parametrize("op", ALL_OPS.values(), ids=lambda op: op.name)
def test_every_op_has_corners_and_the_quick_profile_has_room_for_them(op: type[Op]) -> None:
    everything = corners(op, 10**9, 10**12)
    assert everything
    assert all(type(problem.op) is op for problem in everything)
    assert len(set(everything)) == len(everything)
    assert corners(op, QUICK.max_elements, QUICK.max_macs) == everything
    assert len(corners(op, 10, 10)) < len(everything)


@pytest.mark.parametrize("op", [Conv2d, MaxPool2d])
def test_windows_whose_axes_differ(op: type[Op]) -> None:
    found = [o for o in quick(op) if isinstance(o, Conv2d | MaxPool2d)]
    for setting in ("kernel_size", "stride", "padding"):
        pairs = [getattr(o, setting) for o in found]
        assert any(h < w for h, w in pairs)
        assert any(h > w for h, w in pairs)
    assert any(s > k for o in found for s, k in zip(o.stride, o.kernel_size, strict=True))


@pytest.mark.parametrize("op", [Linear, MatMul, Softmax])
def test_a_transposed_tensor_can_have_the_right_shape(op: type[Op]) -> None:
    """One corner has equal extents only: there a kernel may mix up axes and still fit."""
    found = corners(op, QUICK.max_elements, QUICK.max_macs)
    assert any(len({*p.inputs[0], *p.output}) == 1 < p.inputs[0][0] for p in found)


@pytest.mark.parametrize("op", [Conv2d, MaxPool2d])
def test_images_wider_than_the_networks_and_batches_over_64(op: type[Op]) -> None:
    outputs = [p.output for p in corners(op, QUICK.max_elements, QUICK.max_macs)]
    assert any(w > 120 for _, _, _, w in outputs)
    assert any(n > 64 and n % 64 for n, _, _, _ in outputs)


@pytest.mark.parametrize(
    "name", ["cupy/conv2d/implicit_gemm_wgmma/fp16/nhwc", "numba-cpu/conv2d/implicit_gemm/fp32"]
)
def test_undeclared_sizes_are_crossed_on_every_axis_where_there_is_room(name: str) -> None:
    (kernel,) = (k for k in load_backend(name.split("/")[0]).kernels() if k.id == name)
    how = profile("thorough")
    found = crossings(kernel, how.max_elements, how.max_macs)
    taken = [p for p in found if kernel.refusal(p) is None]
    for place in (0, 1, 2, 3):
        assert any(p.output[place] >= 131 for p in taken)
    assert len(crossings(kernel, QUICK.max_elements, QUICK.max_macs)) < len(found)


def test_padding_on_one_axis_alone() -> None:
    pads = {o.padding for o in quick(Conv2d) if isinstance(o, Conv2d)}
    assert {(0, 1), (1, 0), (0, 0)} <= pads


def test_every_pair_of_layouts() -> None:
    pairs = {(o.source, o.target) for o in quick(Relayout) if isinstance(o, Relayout)}
    assert len(pairs) == 4


def test_more_channels_and_outputs_than_a_grid_has_blocks_along_an_axis() -> None:
    convolutions = [o for o in quick(Conv2d) if isinstance(o, Conv2d)]
    assert any(o.in_channels > GRID for o in convolutions)
    assert any(o.out_channels > GRID for o in convolutions)
    assert any(o.out_features > GRID for o in quick(Linear) if isinstance(o, Linear))


@pytest.mark.parametrize("name", ["cupy/linear/tiled/fp32", "cupy/relayout/transpose/fp32"])
def test_an_edge_is_crossed_on_one_axis_while_another_is_full(name: str) -> None:
    """An edge is crossed on one axis while another is full: on both axes of a product (rows and
    columns) and of a transposition (channels and pixels)."""
    (kernel,) = (k for k in load_backend("cupy").kernels() if k.id == name)
    found = crossings(kernel, QUICK.max_elements, QUICK.max_macs)
    if kernel.op is Linear:
        axes = {(p.batch, p.output[1]) for p in found}
    else:
        axes = {(p.inputs[0][1], p.inputs[0][3]) for p in found}
    assert {(32, 33), (33, 32)} <= axes
    assert {(size, size) for size in (32, 33)}.isdisjoint(axes)


def cupy_kernels(part: str) -> list[Any]:
    """cupy's kernels whose op or algorithm starts with `part`, and that choose their own tile."""
    every = load_backend("cupy").kernels()
    found = [k for k in every if f"/{part}" in k.id and k.id.count("/") < 5]
    assert found
    return found


def persistent_kernels() -> list[Any]:
    """cupy's float kernels whose blocks compute several tiles."""
    parts = ("implicit_gemm_wgmma_stream", "implicit_gemm_wgmma_pingpong")
    return [kernel for part in parts for kernel in cupy_kernels(part)]


@pytest.mark.parametrize("part", ["conv2d_maxpool2d/few_channels", "conv2d/few_channels"])
def test_blocks_go_down_a_tall_image_further_than_their_rings_are_long(part: str) -> None:
    for kernel in cupy_kernels(part):
        taken = [
            problem
            for problem in corners(kernel.op, QUICK.max_elements, QUICK.max_macs)
            if kernel.refusal(problem) is None
        ]
        assert max(kernel.blocking(problem).strip for problem in taken) >= 6
        if "maxpool2d" in kernel.id:
            assert max(kernel.blocking(p).tile.column_tiles(p) for p in taken) >= 3


def test_strips_and_tiles_of_an_integer_stem_are_several_for_every_kind_of_image() -> None:
    for kernel in cupy_kernels("qconv2d_maxpool2d/few_channels_wgmma"):
        for stored in ("int8", "uint8", "float32"):
            found = corners(kernel.op, QUICK.max_elements, QUICK.max_macs)
            taken = [
                problem
                for problem in found
                if kernel.refusal(problem) is None and problem.op.input_storage == (stored,)
            ]
            strips = [(kernel.blocking(p).strip, p.output[2]) for p in taken]
            assert any(rows > strip >= STAGES and rows % strip for strip, rows in strips)
            widths = {kernel.blocking(p).tile.column_tiles(p) for p in taken}
            assert 1 in widths
            assert max(widths) >= 3


def test_blocks_that_stay_take_several_tiles() -> None:
    for kernel in persistent_kernels():
        found = corners(Conv2d, QUICK.max_elements, QUICK.max_macs)
        taken = [problem for problem in found if kernel.refusal(problem) is None]
        assert any(p.batch > 2 * launch.grid[0] for p in taken for launch in kernel.launches(p))


def test_blocks_that_stay_go_on_to_tiles_of_other_channels() -> None:
    for kernel in persistent_kernels():
        turns = []
        for problem in corners(Conv2d, QUICK.max_elements, QUICK.max_macs):
            if kernel.refusal(problem) is None:
                (launch,) = kernel.launches(problem)
                tiles = -(-problem.output[1] // kernel.tile_for(problem).m)
                turns.append((problem.batch * tiles > 2 * launch.grid[0], launch.grid[0] % tiles))
        assert any(several and change for several, change in turns)


def test_windows_of_an_even_number_of_columns_with_their_pooling() -> None:
    for kernel in cupy_kernels("conv2d_maxpool2d/few_channels_wgmma"):
        taken = [
            problem
            for problem in corners(kernel.op, QUICK.max_elements, QUICK.max_macs)
            if kernel.refusal(problem) is None
        ]
        assert {p.op.conv.kernel_size[1] for p in taken} >= {2, 4, 7, 8}


# -- of integers -------------------------------------------------------------------------------


def test_each_two_values_of_different_numbers_meet() -> None:
    numbers = {"a": (0, 1), "b": (0, 1, 2), "c": (5,), "d": (2, 1, 0), "e": (0, 1)}
    found = pairwise(numbers)
    assert found == pairwise(numbers)
    assert found[0] == {name: values[0] for name, values in numbers.items()}
    assert len(found) < 12
    for (a, of_a), (b, of_b) in combinations(numbers.items(), 2):
        assert {(row[a], row[b]) for row in found} == set(product(of_a, of_b))
    assert pairwise({"a": (3, 1)}) == ({"a": 3}, {"a": 1})


def test_formats_bits_relu_and_residual_of_a_quantised_convolution_meet() -> None:
    of_one = [o for o in quick(QuantizedConv2d) if isinstance(o, QuantizedConv2d)]
    of_one = [o for o in of_one if replace(o.conv, residual=False, relu=False) == qconv2d.CROSSED]
    found = {
        (o.stored[0], o.bits, o.conv.relu, o.stored[1] if o.conv.residual else None) for o in of_one
    }
    formats = ("uint8", "int8")
    values = (formats, (8, 4, 2), (False, True), (None, *formats))
    for a, b in combinations(range(len(values)), 2):
        assert {(row[a], row[b]) for row in found} == set(product(values[a], values[b]))


@pytest.mark.parametrize("name", ["brief", "quick", "ci", "thorough"])
@pytest.mark.parametrize("op", [QuantizedConv2d, QuantizedLinear])
def test_the_longest_sums_reach_both_ends_of_int32(op: type[Op], name: str) -> None:
    how = profile(name)
    (problem,) = (
        p for p in corners(op, how.max_elements, how.max_macs) if p.inputs[0][1] == MOST_DEPTH
    )
    edges = {QuantizedConv2d: qconv2d.EDGES, QuantizedLinear: qlinear.EDGES}[op]
    (kernel,) = (k for k in load_backend("numpy").kernels() if k.op is op)
    case = make_case(kernel, problem, "edges", 1, edges.index("largest_sums"))
    image, (weight, bias, *_) = case.inputs[0].reshape(-1), case.weights
    products = weight.reshape(len(weight), -1).astype(np.int64) @ image.astype(np.int64)
    assert kernel.precision is INT8
    assert max(products) == MOST_DEPTH * 255 * 127
    assert min(products) == -max(products)
    assert {*(products + bias)} >= {MOST_SUM, -MOST_SUM}
