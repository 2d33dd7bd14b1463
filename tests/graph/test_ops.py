"""Ops: shapes against PyTorch's, validation when made, names and counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from r18.errors import ShapeError
from r18.graph.ops import (
    OPS,
    Add,
    AvgPoolLinear,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    ConvProjection,
    GlobalAvgPool,
    Layout,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
    Softmax,
    parts_of,
)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)
pairs = st.tuples


def small(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return pairs(st.integers(low, high), st.integers(low, high))


@SETTINGS
@given(
    image=small(1, 20), kernel=small(1, 7), stride=small(1, 4), padding=small(0, 4), n=small(1, 3)
)
def test_conv_shape_and_macs_equal_pytorch(
    image: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    n: tuple[int, int],
) -> None:
    """A convolution has PyTorch's shape, and is refused if PyTorch refuses it."""
    batch, channels = n
    op = Conv2d(channels, 5, kernel, stride, padding)
    x = torch.empty(batch, channels, *image, device="meta")
    w = torch.empty(5, channels, *kernel, device="meta")
    try:
        expected = tuple(F.conv2d(x, w, None, stride, padding).shape)
    except RuntimeError:
        with pytest.raises(ShapeError):
            op.infer(tuple(x.shape))
        return
    assert op.infer(tuple(x.shape)) == expected
    products = expected[0] * expected[1] * expected[2] * expected[3] * w[0].numel()
    assert Problem(op, (tuple(x.shape),)).macs == products


@SETTINGS
@given(
    image=small(1, 20),
    kernel=small(1, 4),
    stride=small(1, 3),
    padding=small(0, 4),
    dilation=small(1, 4),
    groups=st.integers(1, 4),
)
def test_grouped_and_dilated_shapes_weights_and_macs_equal_pytorch(
    image: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> None:
    op = Conv2d(3 * groups, 2 * groups, kernel, stride, padding, groups=groups, dilation=dilation)
    module = torch.nn.Conv2d(
        3 * groups, 2 * groups, kernel, stride, padding, dilation, groups, bias=False
    )
    assert op.weights()[0].shape == tuple(module.weight.shape)
    x = torch.ones(2, 3 * groups, *image)
    try:
        with torch.no_grad():
            expected = tuple(module(x).shape)
    except RuntimeError:
        with pytest.raises(ShapeError):
            op.infer(tuple(x.shape))
        return
    problem = Problem(op, (tuple(x.shape),))
    assert problem.output == expected
    per_output = module.weight[0].numel()
    assert problem.macs == expected[0] * expected[1] * expected[2] * expected[3] * per_output
    reads = torch.zeros_like(x, requires_grad=True)
    torch.nn.functional.conv2d(
        reads, torch.ones_like(module.weight), None, stride, padding, dilation, groups
    ).sum().backward()
    assert reads.grad is not None
    assert op.covered(tuple(x.shape)) == (int((reads.grad != 0).sum()),)


def test_groups_and_dilation_of_1_are_in_no_name() -> None:
    """Groups and dilation of 1 appear in no name, so older tables and records stay valid."""
    plain = Problem(Conv2d(4, 8, (3, 3), (2, 2), (1, 1), bias=True), ((1, 4, 8, 8),))
    assert str(plain) == (
        "conv2d+bias(in_channels=4, out_channels=8, kernel_size=3×3, stride=2×2, padding=1×1) "
        "1×4×8×8 → 1×8×4×4"
    )
    assert not plain.op.extras
    assert not plain.op.settings.keys() & {"groups", "dilation"}
    both = dataclasses.replace(plain.op, groups=2, dilation=(1, 2))
    assert str(Problem(both, ((1, 4, 8, 8),))) == (
        "conv2d+bias(in_channels=4, out_channels=8, kernel_size=3×3, stride=2×2, padding=1×1, "
        "groups=2, dilation=1×2) 1×4×8×8 → 1×8×4×3"
    )
    pooled = ConvMaxPool(both, MaxPool2d((2, 2), (2, 2)))
    assert both.extras == pooled.extras == {"groups": "2", "dilation": "1×2"}


def test_groups_divide_both_kinds_of_channels() -> None:
    for channels, outputs in ((6, 8), (8, 6)):
        with pytest.raises(ShapeError, match="4 groups do not divide"):
            Conv2d(channels, outputs, (1, 1), groups=4)
    for wrong in (0, -1, 1.0, True):
        with pytest.raises(ShapeError, match="groups must be"):
            Conv2d(4, 4, (1, 1), groups=wrong)  # type: ignore[arg-type]
    for pair in ((0, 1), (1,), 2.0):
        with pytest.raises(ShapeError, match="dilation must be an integer ≥ 1"):
            Conv2d(4, 4, (1, 1), dilation=pair)  # type: ignore[arg-type]
    assert Conv2d(4, 4, (1, 1), dilation=3).dilation == (3, 3)  # type: ignore[arg-type]


@SETTINGS
@given(image=small(1, 20), kernel=small(1, 7), stride=small(1, 4), padding=small(0, 3))
def test_maxpool_shape_equals_pytorch(
    image: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> None:
    assume(all(2 * p <= k for p, k in zip(padding, kernel, strict=True)))
    op = MaxPool2d(kernel, stride, padding)
    x = torch.empty(2, 3, *image, device="meta")
    try:
        expected = tuple(F.max_pool2d(x, kernel, stride, padding).shape)
    except RuntimeError:
        with pytest.raises(ShapeError):
            op.infer(tuple(x.shape))
        return
    assert op.infer(tuple(x.shape)) == expected


@pytest.mark.parametrize(
    ("op", "inputs", "output"),
    [
        (BatchNorm(4), ((2, 4, 5, 6),), (2, 4, 5, 6)),
        (ReLU(), ((2, 4, 5, 6),), (2, 4, 5, 6)),
        (ReLU(), ((2, 4),), (2, 4)),
        (Add(), ((2, 4), (2, 4)), (2, 4)),
        (Add(relu=True), ((2, 4, 1, 1), (2, 4, 1, 1)), (2, 4, 1, 1)),
        (GlobalAvgPool(), ((2, 4, 5, 6),), (2, 4)),
        (Linear(4, 7), ((2, 4),), (2, 7)),
        (Softmax(), ((2, 4),), (2, 4)),
        (Relayout(Layout.NCHW, Layout.NHWC), ((2, 4, 5, 6),), (2, 4, 5, 6)),
        (Conv2d(3, 8, (1, 1), residual=True), ((2, 3, 4, 5), (2, 8, 4, 5)), (2, 8, 4, 5)),
        (Normalize((0.5, 0.4), (0.2, 0.3)), ((3, 2, 4, 5),), (3, 2, 4, 5)),
    ],
    ids=lambda value: value.label if isinstance(value, Op) else "",
)
def test_inferred_shapes(op: Op, inputs: tuple[Any, ...], output: tuple[int, ...]) -> None:
    assert op.infer(*inputs) == output
    assert Problem(op, inputs).output == output


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        (BatchNorm(4), ((2, 3, 5, 5),), "expected 4 channels"),
        (BatchNorm(4), ((2, 4),), "4-d"),
        (Normalize((0.5,), (0.2,)), ((2, 3, 4, 5),), "expected 1 channels"),
        (Normalize((0.5,), (0.2,)), ((2, 1),), "4-d"),
        (Add(), ((2, 4), (2, 5)), "shapes differ"),
        (Add(), ((2, 4),), r"takes 2 input\(s\), got 1"),
        (ReLU(), ((2, 4), (2, 4)), r"takes 1 input\(s\), got 2"),
        (Linear(4, 7), ((2, 5),), "expected 4 features"),
        (Linear(4, 7), ((2, 4, 1, 1),), "2-d"),
        (Softmax(), ((2, 4, 1, 1),), "2-d"),
        (GlobalAvgPool(), ((2, 4),), "4-d"),
        (GlobalAvgPool(), ((2, 4, 0, 3),), "at least 1"),
        (Conv2d(3, 8, (3, 3)), ((1, 4, 5, 5),), "expected 3 channels"),
        (Conv2d(3, 8, (3, 3)), ((0, 3, 5, 5),), "at least 1"),
        (Conv2d(3, 8, (3, 3)), ((1, 3, 5, 2),), "width.*window of 3 does not fit"),
        (Conv2d(3, 8, (3, 3)), ((1, 3, 2, 5),), "height.*window of 3 does not fit"),
        (
            Conv2d(3, 8, (3, 3), residual=True),
            ((1, 3, 5, 5), (1, 8, 5, 5)),
            "residual is .* the output is",
        ),
        (MaxPool2d((3, 3), (2, 2)), ((1, 3, 2, 5),), "height.*window of 3 does not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_when_the_problem_is_made(
    op: Op, inputs: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        Problem(op, inputs)


NONSENSE: list[tuple[type[Op], dict[str, Any]]] = [
    (Conv2d, {"in_channels": 0}),
    (Conv2d, {"out_channels": 0}),
    (Conv2d, {"kernel_size": (0, 3)}),
    (Conv2d, {"kernel_size": (3,)}),
    (Conv2d, {"stride": (0, 1)}),
    (Conv2d, {"stride": (1, 1, 1)}),
    (Conv2d, {"padding": (-1, 0)}),
    (MaxPool2d, {"kernel_size": (0, 3)}),
    (MaxPool2d, {"kernel_size": (3,)}),
    (MaxPool2d, {"stride": (0, 1)}),
    (MaxPool2d, {"stride": (2,)}),
    (MaxPool2d, {"padding": (-1, 0)}),
    (MaxPool2d, {"padding": (2, 0)}),  # a window could hold padding alone
    (BatchNorm, {"channels": 0}),
    (BatchNorm, {"eps": 0.0}),
    (BatchNorm, {"eps": float("nan")}),
    (BatchNorm, {"eps": float("inf")}),
    (Linear, {"in_features": 0}),
    (Linear, {"out_features": 0}),
    (Normalize, {"mean": ()}),
    (Normalize, {"mean": (0.5,)}),
    (Normalize, {"mean": (0.5, float("inf"))}),
    (Normalize, {"std": (0.2, 0.0)}),
    (Normalize, {"std": (0.2, float("nan"))}),
]
SENSE: dict[type[Op], dict[str, Any]] = {
    Conv2d: {"in_channels": 3, "out_channels": 8, "kernel_size": (3, 3)},
    MaxPool2d: {"kernel_size": (3, 3), "stride": (2, 2)},
    BatchNorm: {"channels": 4},
    Linear: {"in_features": 4, "out_features": 7},
    Normalize: {"mean": (0.5, 0.4), "std": (0.2, 0.3)},
}


@pytest.mark.parametrize(
    ("op", "wrong"), NONSENSE, ids=[f"{op.name}-{wrong}" for op, wrong in NONSENSE]
)
def test_an_op_that_makes_no_sense_cannot_be_made(op: type[Op], wrong: dict[str, Any]) -> None:
    op(**SENSE[op])
    with pytest.raises(ShapeError):
        op(**{**SENSE[op], **wrong})


@pytest.mark.parametrize(
    ("op", "label"),
    [
        (Conv2d(3, 8, (3, 3)), "conv2d"),
        (Conv2d(3, 8, (3, 3), bias=True), "conv2d+bias"),
        (Conv2d(3, 8, (3, 3), relu=True), "conv2d+relu"),
        (
            Conv2d(3, 8, (3, 3), bias=True, residual=True, relu=True),
            "conv2d+bias+residual+relu",
        ),
        (Add(), "add"),
        (Add(relu=True), "add+relu"),
        (Relayout(Layout.NCHW, Layout.NHWC), "relayout nchw→nhwc"),
        (GlobalAvgPool(), "gap"),
    ],
)
def test_labels_name_what_is_fused(op: Op, label: str) -> None:
    assert op.label == label


@pytest.mark.parametrize(
    ("op", "specs"),
    [
        (Conv2d(3, 8, (5, 7)), {"weight": ((8, 3, 5, 7), "OIHW", "conv_weight")}),
        (
            Conv2d(3, 8, (1, 1), bias=True),
            {
                "weight": ((8, 3, 1, 1), "OIHW", "conv_weight"),
                "bias": ((8,), "O", "conv_bias"),
            },
        ),
        (
            BatchNorm(4),
            {
                "weight": ((4,), "O", "bn_param"),
                "bias": ((4,), "O", "bn_param"),
                "running_mean": ((4,), "O", "bn_buffer"),
                "running_var": ((4,), "O", "bn_buffer"),
            },
        ),
        (
            Linear(4, 7),
            {"weight": ((7, 4), "OI", "fc_weight"), "bias": ((7,), "O", "fc_bias")},
        ),
        (ReLU(), {}),
    ],
)
def test_weight_specs(op: Op, specs: dict[str, tuple[Any, ...]]) -> None:
    assert {s.role: (s.shape, s.layout, s.kind) for s in op.weights()} == specs
    assert [s.role for s in op.weights()] == list(specs)  # the order that kernels are given


def test_macs_count_products_of_convolution_and_linear_alone() -> None:
    assert Problem(Conv2d(3, 8, (3, 3)), ((2, 3, 5, 5),)).macs == 2 * 8 * 3 * 3 * 27
    assert Problem(Linear(4, 7), ((2, 4),)).macs == 2 * 4 * 7
    for op in (BatchNorm(3), ReLU(), GlobalAvgPool(), MaxPool2d((1, 1), (1, 1))):
        assert Problem(op, ((2, 3, 5, 5),)).macs == 0


def test_a_problem_reads_as_one_line() -> None:
    op = Conv2d(3, 8, (3, 5), (2, 1), (1, 2), bias=True, relu=True)
    assert str(Problem(op, ((2, 3, 7, 9),))) == (
        "conv2d+bias+relu(in_channels=3, out_channels=8, kernel_size=3×5, stride=2×1, "
        "padding=1×2) 2×3×7×9 → 2×8×4×9"
    )
    assert str(Problem(Relayout(Layout.NHWC, Layout.NCHW), ((1, 2, 3, 4),))) == (
        "relayout nhwc→nchw(source=nhwc, target=nchw) 1×2×3×4 → 1×2×3×4"
    )


STEM = ConvMaxPool(
    Conv2d(3, 8, (7, 5), (2, 1), (3, 2), bias=True, relu=True), MaxPool2d((3, 2), (2, 3), (1, 1))
)


def test_a_convolution_with_its_pooling_is_one_op_of_two() -> None:
    problem = Problem(STEM, ((2, 3, 9, 8),))
    assert STEM.label == "conv2d+bias+relu+maxpool2d"
    assert STEM.arity == 1
    assert STEM.weights() == STEM.conv.weights()
    assert problem.output == (2, 8, 3, 3) == STEM.pool.infer(STEM.conv.infer((2, 3, 9, 8)))
    assert problem.macs == STEM.conv.macs((2, 3, 9, 8)) == 2 * 8 * 5 * 8 * (3 * 7 * 5)
    assert parts_of(problem) == (
        Problem(STEM.conv, ((2, 3, 9, 8),)),
        Problem(STEM.pool, ((2, 8, 5, 8),)),
    )
    assert str(problem) == (
        "conv2d+bias+relu+maxpool2d(in_channels=3, out_channels=8, kernel_size=7×5, stride=2×1, "
        "padding=3×2; kernel_size=3×2, stride=2×3, padding=1×1) 2×3×9×8 → 2×8×3×3"
    )


def test_a_convolution_with_its_pooling_refuses_what_either_refuses() -> None:
    residual = Conv2d(3, 3, (1, 1), residual=True)
    with pytest.raises(ShapeError, match=r"conv2d_maxpool2d: the convolution takes no residual"):
        ConvMaxPool(residual, MaxPool2d((2, 2), (2, 2)))
    with pytest.raises(ShapeError, match="expected 3 channels"):
        STEM.infer((1, 4, 9, 8))
    with pytest.raises(ShapeError, match="takes 1 input"):
        STEM.infer((1, 3, 9, 8), (1, 3, 9, 8))
    with pytest.raises(ShapeError, match="maxpool2d height"):  # of the convolution's output
        ConvMaxPool(Conv2d(3, 8, (3, 3)), MaxPool2d((3, 3), (1, 1))).infer((1, 3, 4, 9))
    with pytest.raises(ShapeError, match="relu has no parts"):
        parts_of(Problem(ReLU(), ((1, 2),)))


ADDS = Conv2d(4, 8, (3, 5), (2, 1), (1, 2), bias=True, residual=True, relu=True)
SHORTCUT = Conv2d(3, 8, (1, 2), (2, 3), bias=True)
BLOCK = ConvProjection(ADDS, SHORTCUT)
IMAGES = (2, 4, 5, 6), (2, 3, 6, 18)


def test_a_convolution_with_its_projection_is_one_op_of_two() -> None:
    problem = Problem(BLOCK, IMAGES)
    assert BLOCK.label == "conv2d+bias+residual+relu+conv2d+bias"
    assert BLOCK.name == "conv2d_projection"
    assert BLOCK.optional
    assert (BLOCK.arity, BLOCK.relu, BLOCK.depth) == (2, True, 4 * 3 * 5 + 3 * 2)
    assert problem.output == (2, 8, 3, 6) == SHORTCUT.infer(IMAGES[1])
    assert problem.macs == 2 * 8 * 3 * 6 * BLOCK.depth
    assert problem.macs == ADDS.macs(IMAGES[0], problem.output) + SHORTCUT.macs(IMAGES[1])
    assert parts_of(problem) == (
        Problem(SHORTCUT, IMAGES[1:]),
        Problem(ADDS, (IMAGES[0], problem.output)),
    )
    assert BLOCK.parts == tuple(part.op for part in parts_of(problem))
    assert str(problem) == (
        "conv2d+bias+residual+relu+conv2d+bias(in_channels=4, out_channels=8, kernel_size=3×5, "
        "stride=2×1, padding=1×2; in_channels=3, out_channels=8, kernel_size=1×2, stride=2×3, "
        "padding=0×0) 2×4×5×6, 2×3×6×18 → 2×8×3×6"
    )


def test_weights_of_a_projection_follow_the_convolution_s() -> None:
    found = BLOCK.weights()
    roles = ("weight", "bias", "projection_weight", "projection_bias")
    assert tuple(spec.role for spec in found) == roles
    shapes = [(8, 4, 3, 5), (8,), (8, 3, 1, 2), (8,)]
    assert [spec.shape for spec in found] == shapes
    assert [spec.kind for spec in found] == ["conv_weight", "conv_bias"] * 2
    bare = dataclasses.replace(SHORTCUT, bias=False)
    roles = tuple(spec.role for spec in ConvProjection(ADDS, bare).weights())
    assert roles == ("weight", "bias", "projection_weight")
    bare = dataclasses.replace(ADDS, bias=False)
    roles = tuple(spec.role for spec in ConvProjection(bare, SHORTCUT).weights())
    assert roles == ("weight", "projection_weight", "projection_bias")


def test_pixels_that_a_projection_steps_over_are_not_read() -> None:
    """Of rows 0 to 5 the first, third and fifth; of columns 0 to 17 two of each three."""
    assert BLOCK.covered(*IMAGES) == (2 * 4 * 5 * 6, 2 * 3 * 3 * 12)
    reads = SHORTCUT.covered(IMAGES[1]), ADDS.covered(IMAGES[0], (2, 8, 3, 6))
    assert reads == ((2 * 3 * 3 * 12,), (2 * 4 * 5 * 6, 2 * 8 * 3 * 6))


def test_extras_of_a_projection_are_those_of_either_convolution() -> None:
    assert not BLOCK.extras
    grouped = dataclasses.replace(ADDS, groups=2)
    assert ConvProjection(grouped, SHORTCUT).extras == {"groups": "2"}
    dilated = dataclasses.replace(SHORTCUT, dilation=(1, 2))
    assert ConvProjection(grouped, dilated).extras == {"groups": "2", "dilation": "1×2"}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: ConvProjection(ADDS, ReLU()),  # type: ignore[arg-type]
            "conv2d_projection is made of two Conv2d, got Conv2d and ReLU",
        ),
        (
            lambda: ConvProjection(ReLU(), SHORTCUT),  # type: ignore[arg-type]
            "conv2d_projection is made of two Conv2d, got ReLU and Conv2d",
        ),
        (
            lambda: ConvProjection(SHORTCUT, SHORTCUT),
            "conv2d_projection: the convolution adds a residual, got conv2d+bias",
        ),
        (
            lambda: ConvProjection(ADDS, dataclasses.replace(SHORTCUT, relu=True)),
            "conv2d_projection: the projection has neither residual nor ReLU, got conv2d+bias+relu",
        ),
        (
            lambda: ConvProjection(ADDS, dataclasses.replace(SHORTCUT, residual=True)),
            "conv2d_projection: the projection has neither residual nor ReLU, "
            "got conv2d+bias+residual",
        ),
        (
            lambda: ConvProjection(ADDS, dataclasses.replace(SHORTCUT, out_channels=7)),
            "conv2d_projection: convolution and projection have as many output channels, got "
            "8 and 7",
        ),
        (
            lambda: BLOCK.infer(IMAGES[0]),
            "conv2d+bias+residual+relu+conv2d+bias takes 2 input(s), got 1",
        ),
        (
            lambda: BLOCK.infer(IMAGES[0], (3, 6, 18)),
            "conv2d+bias+residual+relu+conv2d+bias takes 4-d inputs, got shape (3, 6, 18)",
        ),
        (
            lambda: BLOCK.infer(IMAGES[0], (2, 4, 6, 18)),
            "conv2d+bias: expected 3 channels, got (2, 4, 6, 18)",
        ),
        (
            lambda: BLOCK.infer((2, 3, 5, 6), IMAGES[1]),
            "conv2d+bias+residual+relu: expected 4 channels, got (2, 3, 5, 6)",
        ),
        (
            lambda: BLOCK.infer(IMAGES[0], (2, 3, 4, 18)),
            "conv2d+bias+residual+relu: residual is (2, 8, 2, 6), the output is (2, 8, 3, 6)",
        ),
        (
            lambda: BLOCK.macs(IMAGES[0], (1, 3, 6, 18)),
            "conv2d+bias+residual+relu: residual is (1, 8, 3, 6), the output is (2, 8, 3, 6)",
        ),
    ],
)
def test_a_convolution_with_its_projection_refuses_what_does_not_fit(made: Any, said: str) -> None:
    with pytest.raises(ShapeError) as failure:
        made()
    assert str(failure.value) == said


def test_pooling_with_its_linear_layer_is_one_op_of_two() -> None:
    op = AvgPoolLinear(Linear(3, 5))
    problem = Problem(op, ((2, 3, 4, 7),))
    assert op.label == "gap+linear"
    assert op.weights() == op.linear.weights()
    assert problem.output == (2, 5)
    assert problem.macs == 2 * 3 * 5
    assert parts_of(problem) == (
        Problem(GlobalAvgPool(), ((2, 3, 4, 7),)),
        Problem(Linear(3, 5), ((2, 3),)),
    )
    assert str(problem) == "gap+linear(in_features=3, out_features=5) 2×3×4×7 → 2×5"
    with pytest.raises(ShapeError, match="gap_linear takes a Linear, got ReLU"):
        AvgPoolLinear(ReLU())  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="linear: expected 3 features"):
        op.infer((2, 4, 4, 7))
    with pytest.raises(ShapeError, match="gap takes 4-d inputs"):
        op.infer((2, 3))


def test_physical_shapes() -> None:
    assert Layout.NHWC.physical((2, 3, 4, 5)) == (2, 4, 5, 3)
    assert Layout.NCHW.physical((2, 3, 4, 5)) == (2, 3, 4, 5)
    assert Layout.NHWC.physical((2, 3)) == (2, 3)


def test_ops_are_values() -> None:
    """Equal ops are one key and immutable, on which plans and caches rely."""
    assert len({Conv2d(3, 8, (3, 3)), Conv2d(3, 8, (3, 3)), Conv2d(3, 8, (3, 3), relu=True)}) == 2
    assert {Problem(ReLU(), ((1, 2),)): 1}[Problem(ReLU(), ((1, 2),))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReLU().name = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Conv2d(3, 8, (3, 3)).relu = True  # type: ignore[misc]


def test_every_op_is_listed_by_its_name() -> None:
    assert set(OPS.values()) == {c for c in Op.__subclasses__() if c.__module__ == "r18.graph.ops"}
    assert all(cls.name == name for name, cls in OPS.items())
