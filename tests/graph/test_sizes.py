"""Sizes from callers: ints for pairs, and lists, are accepted; all else gets a message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from r18.backend import tensor_nbytes
from r18.errors import R18Error, ScheduleError, ShapeError, UnknownName, UsageError, unknown
from r18.graph.ops import (
    Add,
    BatchNorm,
    Conv2d,
    ConvMaxPool,
    Linear,
    MaxPool2d,
    Normalize,
    Op,
    Problem,
    Relayout,
    ReLU,
)
from r18.graph.precision import precision
from r18.graph.resnet import network, resnet, tiny
from r18.graph.schedule import Schedule, Step
from r18.runtime.arena import Lifetime, plan_arena

ANY: Any = None
"""An `Any`, for calls that the type checker would reject."""


def op(kind: Any, *args: Any, **named: Any) -> Op:
    """An op, made as an untyped caller would."""
    made: Op = kind(*args, **named)
    return made


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (op(Conv2d, 3, 4, 3), Conv2d(3, 4, (3, 3))),
        (op(Conv2d, 3, 4, 3, 2, 1), Conv2d(3, 4, (3, 3), (2, 2), (1, 1))),
        (op(Conv2d, 3, 4, [3, 5], stride=2), Conv2d(3, 4, (3, 5), (2, 2))),
        (op(Conv2d, np.int32(3), np.int64(4), np.int8(3)), Conv2d(3, 4, (3, 3))),
        (op(MaxPool2d, 3, 2, 1), MaxPool2d((3, 3), (2, 2), (1, 1))),
        (op(MaxPool2d, (3, 2), [2, 1]), MaxPool2d((3, 2), (2, 1))),
        (op(Linear, np.uint8(4), 7), Linear(4, 7)),
        (op(Normalize, [0.5, 1], [0.2, 1]), Normalize((0.5, 1.0), (0.2, 1.0))),
        (op(BatchNorm, 4, np.float64(1e-3)), BatchNorm(4, 1e-3)),
    ],
    ids=str,
)
def test_an_int_stands_for_both_axes_as_in_pytorch(given: Op, same: Op) -> None:
    assert given == same
    assert hash(given) == hash(same)
    assert repr(given) == repr(same) or isinstance(given, BatchNorm | Normalize)
    if isinstance(given, Conv2d | MaxPool2d):
        for pair in (given.kernel_size, given.stride, given.padding):
            assert [type(extent) for extent in pair] == [int, int]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: op(Conv2d, 3, 4, 3.0), "kernel_size must be an integer ≥ 1 or two of them, got 3"),
        (lambda: op(Conv2d, 3, 4, "3"), "kernel_size must be an integer ≥ 1 .* got '3'"),
        (lambda: op(Conv2d, 3, 4, None), "kernel_size must be an integer ≥ 1 .* got None"),
        (lambda: op(Conv2d, 3, 4, (3, 3.5)), r"kernel_size must be .* got \(3, 3\.5\)"),
        (lambda: op(Conv2d, 3, 4, (3, (3, 3))), "kernel_size must be"),
        (lambda: op(Conv2d, 3, 4, 3, stride=True), "stride must be .* got True"),
        (lambda: op(Conv2d, 3, 4, 3, 1, "same"), "padding must be an integer ≥ 0 .* got 'same'"),
        (lambda: op(Conv2d, 3.0, 4, 3), "conv2d: in_channels must be an integer, got 3.0"),
        (lambda: op(Conv2d, 3, [4], 3), r"conv2d: out_channels must be an integer, got \[4\]"),
        # PyTorch's next argument is dilation.
        (lambda: op(Conv2d, 3, 4, 3, 1, 1, 2), "conv2d: bias must be True or False, got 2"),
        (lambda: op(Add, "yes"), "add: relu must be True or False, got 'yes'"),
        (lambda: op(MaxPool2d, 3, 2, 0.5), "maxpool2d: padding must be an integer ≥ 0"),
        (lambda: op(MaxPool2d, 3, None), "maxpool2d: stride must be an integer ≥ 1 .* got None"),
        (lambda: op(Linear, "512", 10), "linear: in_features must be an integer, got '512'"),
        (lambda: op(BatchNorm, 4.0), "batchnorm: channels must be an integer, got 4.0"),
        (lambda: op(BatchNorm, 4, "1e-5"), "batchnorm: eps must be positive and finite, got '1e"),
        (lambda: op(Normalize, 0.5, 0.2), "normalize: mean must be a tuple of numbers, got 0.5"),
        (lambda: op(Normalize, ("a",), (1,)), r"mean must be a tuple of numbers, got \('a',\)"),
        (lambda: op(Relayout, "nchw", "nhwc"), "source and target are of .*Layout, got 'nchw'"),
        (lambda: op(ConvMaxPool, ReLU(), MaxPool2d((1, 1), (1, 1))), "got ReLU and MaxPool2d"),
        (lambda: Problem(ANY, ((1, 2),)), "a problem is of an op of r18.graph.ops, got None"),
        (lambda: Problem(ReLU(), ANY), "inputs must be a tuple of shapes, got None"),
        (
            lambda: Problem(ReLU(), op(tuple, (1, 3, 4, 4))),  # type: ignore[arg-type]
            "relu: the shape of an input must be a tuple of integers, got 1",
        ),
        (
            lambda: Problem(ReLU(), ((1, 3, 4.0, 4),)),  # type: ignore[arg-type]
            "relu: the shape of an input must be an integer, got 4.0",
        ),
        (
            lambda: Problem(ReLU(), ("134",)),  # type: ignore[arg-type]
            "relu: the shape of an input must be a tuple of integers, got '134'",
        ),
        (lambda: network("tiny", classes=ANY), "out_features must be an integer, got None"),
        (lambda: tiny(image_size=32.0), "schedule 'tiny': the input's shape must be an integer"),  # type: ignore[arg-type]
        (lambda: resnet(blocks=(1, 1.5)), "blocks must be an integer, got 1.5"),  # type: ignore[arg-type]
        (lambda: tiny().shapes(ANY), "batch must be an integer, got None"),
    ],
)
def test_what_is_no_size_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        make()


def test_a_long_argument_is_not_quoted_whole() -> None:
    with pytest.raises(ShapeError) as caught:
        op(Conv2d, 3, 4, list(range(1000)))
    assert len(str(caught.value)) < 200
    assert "…" in str(caught.value)


def test_lists_and_numpys_integers_are_sizes() -> None:
    shape: Any = [np.int32(1), 3, np.uint16(4), 4]
    problem = Problem(ReLU(), [shape])  # type: ignore[arg-type]
    assert problem == Problem(ReLU(), ((1, 3, 4, 4),))
    assert hash(problem) == hash(Problem(ReLU(), ((1, 3, 4, 4),)))
    assert [type(extent) for extent in problem.inputs[0]] == [int] * 4
    schedule = Schedule("one", [3, 4, 4], (Step("relu", ReLU(), ("image",), "relu"),), ())  # type: ignore[arg-type]
    assert schedule.input_shape == (3, 4, 4)
    assert schedule.shapes(np.int64(2))["relu"] == (2, 3, 4, 4)  # type: ignore[arg-type]


def test_a_scalar_has_a_batch_of_one() -> None:
    assert Problem(ReLU(), ((),)).batch == 1
    assert Problem(ReLU(), ((),)).output == ()


# -- sizes that would wrap -------------------------------------------------------------------


def test_bytes_do_not_wrap() -> None:
    """Byte counts do not wrap, as products of NumPy's integers would."""
    wide: Any = (np.int32(65_536), np.int32(65_536))
    assert tensor_nbytes(wide, np.dtype(np.float32)) == 2**34
    wide = (np.int64(2**40), np.int64(2**40))
    assert tensor_nbytes(wide, np.dtype(np.float32)) == 2**82
    lives = [Lifetime(name, np.int32(2**31 - 1), 0, 1) for name in "ab"]  # type: ignore[arg-type]
    assert plan_arena(lives, 64).nbytes == 2**32


@pytest.mark.parametrize(
    "make",
    [
        lambda: Problem(ReLU(), ((2**60,),)),
        lambda: Problem(ReLU(), ((2**20, 2**20, 2**20, 1),)),
        lambda: Problem(ReLU(), ((2**32, 2**32),)),  # 0 in 64 bits
        lambda: Problem(Linear(1, 2**40), ((2**30, 1),)),
        lambda: Problem(Linear(2**32, 2**32), ((1, 2**32),)),  # only the weight is too large
        lambda: Problem(op(Conv2d, 1, 2**40, 1), ((2**20, 1, 4, 4),)),
        lambda: tiny().shapes(2**50),
        lambda: tiny(image_size=2**31),
        lambda: resnet(classes=2**60),
    ],
)
def test_tensors_that_no_memory_holds_are_refused(make: Any) -> None:
    with pytest.raises(ShapeError, match="too large: its bytes exceed"):
        make()


def test_the_largest_tensor_is_not_refused() -> None:
    assert Problem(ReLU(), ((2**60 - 1,),)).output == (2**60 - 1,)


def test_an_arena_that_no_memory_holds_is_refused() -> None:
    lives = [Lifetime(name, 2**62, 0, 1) for name in "ab"]
    assert plan_arena([lives[0]], 64).nbytes == 2**62
    with pytest.raises(UsageError, match=r"an arena of 9223372036854775808 bytes is too large"):
        plan_arena(lives, 64)


# -- names -----------------------------------------------------------------------------------


def test_a_name_of_another_kind_is_refused_in_words() -> None:
    for asked in (None, 5, [], {"a": 1}):
        with pytest.raises(UnknownName, match=r"unknown precision: expected a name, got "):
            precision(asked)  # type: ignore[arg-type]
        with pytest.raises(UnknownName, match=r"unknown network: expected a name, got "):
            network(asked)  # type: ignore[arg-type]
    error: R18Error = unknown("thing", list(range(1000)), ["a"])
    assert len(str(error).splitlines()[0]) < 140


def test_blocks_are_still_a_schedules_matter() -> None:
    with pytest.raises(ScheduleError, match="at least one block a stage"):
        resnet(blocks=(1, 0))
