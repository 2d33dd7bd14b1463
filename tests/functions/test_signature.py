"""Binding a problem's arguments to a function's parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from r18.errors import UnknownName, UsageError
from r18.graph.ops import BatchNorm, Conv2d, GlobalAvgPool, MaxPool2d, Softmax
from r18_oracle.functions.likes import LIKES, Like, like_of
from r18_oracle.functions.signature import Signature


def bound(function: Any, like: Like, op: Any) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments, with the name of each array in its place."""
    call = like.call(op)
    arrays = [None if index is None else name for name, index in call.arrays]
    return Signature.of(function).bound(call, arrays)


PLAIN = Conv2d(3, 4, (3, 3), (1, 1), (0, 0))
STRIDED = Conv2d(3, 4, (3, 3), (2, 1), (1, 1), bias=True)


def test_settings_go_by_name_where_the_function_has_them() -> None:
    def named(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> None: ...

    assert bound(named, LIKES["conv2d"], STRIDED) == (
        ["input", "weight", "bias"],
        {"stride": (2, 1), "padding": 1},
    )
    assert bound(named, LIKES["conv2d"], PLAIN)[0] == ["input", "weight", None]


def test_settings_go_by_position_where_it_has_other_names() -> None:
    def short(x: Any, w: Any, b: Any, s: Any, p: Any) -> None: ...

    assert bound(short, LIKES["conv2d"], STRIDED) == (["input", "weight", "bias", (2, 1), 1], {})


def test_a_function_without_a_signature_gets_all_by_name() -> None:
    """A function without a signature, such as PyTorch's in C++, gets all settings by name."""
    positional, named = bound(torch.conv2d, LIKES["conv2d"], STRIDED)
    assert positional == ["input", "weight", "bias"]
    assert named == {"stride": (2, 1), "padding": 1}


def test_keyword_only_settings() -> None:
    def only(x: Any, w: Any, *, stride: Any = 1) -> None: ...

    signature = Signature.of(only)
    like = LIKES["conv2d"]
    assert signature.refusal(like.call(PLAIN)) is None
    assert signature.refusal(like.call(STRIDED)) == "takes no bias"
    padded = Conv2d(3, 4, (3, 3), (1, 1), (1, 1))
    assert signature.refusal(like.call(padded)) == "takes no padding"
    strided = Conv2d(3, 4, (3, 3), (2, 2), (0, 0))
    assert bound(only, like, strided) == (["input", "weight"], {"stride": 2})


def test_a_function_that_needs_what_no_call_has_is_refused_with_what_calls_have() -> None:
    def many(a: Any, b: Any, c: Any, d: Any = 0) -> None: ...

    def keyword(out: Any, a: Any, *, alpha: Any, beta: Any = 0) -> None: ...

    def enough(x: Any, w: Any, b: Any, *, stride: Any, padding: Any) -> None: ...

    relu, conv2d = LIKES["relu"], LIKES["conv2d"]
    call = relu.call(relu.op())
    assert Signature.of(many).refusal(call) == "needs b and c, and is called with (input)"
    assert Signature.of(keyword).refusal(call) == "needs alpha, and is called with (input)"
    assert Signature.of(F.relu).refusal(call) is None
    assert Signature.of(enough).refusal(conv2d.call(STRIDED)) is None
    with_more = Signature.of(lambda x, w, b, groups: None).refusal(conv2d.call(PLAIN))
    assert with_more == ("needs groups, and is called with (input, weight, bias, stride, padding)")


def test_every_operator_of_pytorch_can_be_called_with_what_its_like_says() -> None:
    """Every PyTorch operator computes its op if called with its like's arguments."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((2, 3, 6, 5)))
    mean, var, weight, bias = (torch.rand(3, dtype=torch.float64) + 0.5 for _ in range(4))
    cases = [
        (F.max_pool2d, "max_pool2d", MaxPool2d((3, 2), (2, 1), (1, 0)), [x]),
        (F.adaptive_avg_pool2d, "adaptive_avg_pool2d", GlobalAvgPool(), [x]),
        (F.softmax, "softmax", Softmax(), [x[:, :, 0, 0]]),
        (F.batch_norm, "batch_norm", BatchNorm(3, 1e-3), [x, weight, bias, mean, var]),
    ]
    for function, name, op, arrays in cases:
        call = LIKES[name].call(op)
        given = [arrays[index] for _, index in call.arrays if index is not None]
        positional, named = Signature.of(function).bound(call, given)
        result = function(*positional, **named)
        assert result.shape[:2] == x.shape[:2]
    expected = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + 1e-3)
    expected = expected * weight[:, None, None] + bias[:, None, None]
    torch.testing.assert_close(result, expected)


def test_names_of_operators() -> None:
    for asked in ("conv2d", "F.conv2d", "torch.nn.functional.conv2d", F.conv2d, torch.conv2d):
        assert like_of(asked) is LIKES["conv2d"]
    assert like_of(F.max_pool2d) is LIKES["max_pool2d"]
    assert like_of(torch.add) is LIKES["add"]
    with pytest.raises(UnknownName, match=r"torch\.nn\.functional\.conv2d"):
        like_of("conv3d")
    with pytest.raises(UsageError, match="takes one of PyTorch's operators"):
        like_of(3)
