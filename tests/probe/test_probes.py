"""The probes' answers for functions that emulate an arithmetic, rounding by rounding."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checked_kernels
from r18_oracle.checked import How, check
from r18_oracle.functions.arithmetic import Arithmetic, expected_of
from r18_oracle.functions.backend import FunctionBackend, FunctionKernel
from r18_oracle.functions.kinds import KINDS
from r18_oracle.functions.likes import LIKES
from r18_oracle.functions.target import Target
from r18_oracle.probe import settle as settling
from r18_oracle.probe.dots import Dots, forms, with_bias
from r18_oracle.probe.order import Order, Unseen, order_of
from r18_oracle.probe.settle import MOST_ELEMENTS, MOST_MACS, Found, settle
from r18_oracle.probe.sums import (
    flushes,
    narrowest,
    rounds_before_bias,
    rounds_products,
    sums_of,
)
from r18_oracle.search.profiles import profile

HERE = Path(checked_kernels.__file__)
TF32 = "sum,float32,factors=tf32"


def settled(name: str, like: str = "matmul", **options: Any) -> Found:
    place = name if ":" in name else f"{HERE}:{name}"
    return settle(target=Target(place, like, **options), announce=lambda problem, kind, seed: None)


@pytest.mark.parametrize(
    ("name", "contract", "below"),
    [
        ("matmul_tf32", "sum,float32,factors=tf32", "multiplies in tf32"),
        ("matmul_tf32_cut", "sum,float32,factors=tf32,truncates", "multiplies in tf32"),
        ("matmul_tf32_weights", "sum,float32,factors=tf32", "multiplies in tf32"),
        ("matmul_half_factors", "sum,float32,factors=float16", "multiplies in float16"),
        ("matmul_bfloat16_factors", "sum,float32,factors=bfloat16", "multiplies in bfloat16"),
        ("matmul_3xtf32", "sum,float32,factors=fp16x2", "multiplies in pairs of 11-bit numbers"),
        ("matmul_half_sums", "sum,float16", "sums in float16"),
        ("matmul_bfloat16_sums", "sum,bfloat16", "sums in bfloat16"),
        ("matmul_split_in_half", "sum,float16", "sums in float16"),
        ("matmul_cut_sums", "sum,float32,truncates", "cuts its sums off instead of rounding them"),
        ("matmul_tensor_core", "sum,float32,factors=tf32,truncates", "multiplies in tf32"),
        ("matmul_sequential", "sum,float32", None),
        ("matmul_pairwise", "sum,float32", None),
        ("matmul_double_sums", "sum,float64", None),
        ("matmul_rounded_products", "sum,float32", None),
        ("numpy:matmul", "sum,float32", None),
        ("torch:matmul", "sum,float32", None),
    ],
)
def test_the_arithmetic_of_sums(name: str, contract: str, below: str | None) -> None:
    found = settled(name)
    assert str(found.arithmetic) == contract == found.target.contract
    assert found.below == (() if below is None else (below,))


def test_products_that_are_rounded_before_they_are_added() -> None:
    found = settled("matmul_rounded_products")
    assert "its products are rounded to float32 before they are added" in found.notes
    half = settled("matmul_rounded_products", dtype="float16")
    assert (str(half.arithmetic), half.below) == ("sum,float16", ("sums in float16",))
    (dots,) = dots_of(checked_kernels.matmul_double_sums)
    assert not rounds_products(dots, "float32")


def test_the_narrowest_sum_is_named_by_its_length_and_form() -> None:
    def long_windows(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
        if w.shape[1:] != (128, 3, 3):
            return checked_kernels.einsum_conv2d(x, w, b, stride, padding)
        rows, columns = x.reshape(len(x), -1), w.reshape(len(w), -1).T
        return checked_kernels.matmul_half_sums(rows, columns)[:, :, None, None]

    def two_rows(a: Any, b: Any) -> Any:
        return (checked_kernels.matmul_half_sums if len(a) == 2 else np.matmul)(a, b)

    sums = narrowest([sums_of(dots, "float32") for dots in dots_of(long_windows, "conv2d")])
    assert sums.words() == "its sums keep 11 bits (1152 terms, a 3×3 window), others up to 24"
    (dots,) = dots_of(two_rows)
    assert (
        sums_of(dots, "float32").words()
        == "its sums keep 11 bits (8 terms, rows, 2 at a time), others up to 24"
    )
    (dots,) = dots_of(checked_kernels.matmul_half_sums)
    assert sums_of(dots, "float32").words() == "its sums keep 11 bits"


def test_sums_of_few_rows_may_have_another_order() -> None:
    """Sums of few rows may have another order: −B, s, B keeps s for one k more than its bits."""

    def ascending(a: Any, b: Any) -> Any:
        if len(a) > 2:
            return a @ b
        total = np.zeros((len(a), b.shape[1]), np.float32)
        for terms in np.sort(a[:, :, None] * b, axis=1).transpose(1, 0, 2):
            total += terms
        return total

    def cut(a: Any, b: Any) -> Any:
        return a @ b if len(a) > 2 else checked_kernels.matmul_cut_sums(a, b)

    for function, truncates in ((ascending, False), (cut, True)):
        (dots,) = dots_of(function)
        sums = sums_of(dots, "float32")
        assert (sums.bits, sums.truncates) == (24, truncates)


def test_half_factors_and_half_sums_are_told_apart() -> None:
    """Half factors and half sums are distinguished, though either rounds one product the same."""

    def all_half(a: Any, b: Any) -> Any:
        a, b = checked_kernels.to_half(a), checked_kernels.to_half(b)
        return checked_kernels.matmul_half_sums(a, b)

    checked_kernels.all_half = all_half  # type: ignore[attr-defined]
    assert str(settled("all_half").arithmetic) == "sum,float16,factors=float16"


def test_arrays_in_float16_keep_sums_in_float32() -> None:
    """Functions of float16 arrays keep sums in float32, which shows if their terms cancel."""

    def wide(a: Any, b: Any) -> Any:
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)

    def narrow(a: Any, b: Any) -> Any:
        return checked_kernels.matmul_sequential(a, b)

    checked_kernels.wide_sums = wide  # type: ignore[attr-defined]
    checked_kernels.narrow_sums = narrow  # type: ignore[attr-defined]
    assert str(settled("wide_sums", dtype="float16").arithmetic) == "sum,float32"
    found = settled("narrow_sums", dtype="float16")
    assert str(found.arithmetic) == "sum,float16"
    assert found.below == ("sums in float16",)


def test_float64_that_multiplies_float32() -> None:
    def short(a: Any, b: Any) -> Any:
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)

    checked_kernels.short = short  # type: ignore[attr-defined]
    found = settled("short", dtype="float64")
    assert "sums in float32" in found.below
    assert settled("numpy:matmul", dtype="float64").below == ()


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("torch.nn.functional:batch_norm", "scale_shift"), ("batch_norm", "batchnorm")],
)
def test_the_form_of_a_batch_norm(name: str, algorithm: str) -> None:
    assert str(settled(name, "batch_norm").arithmetic) == f"{algorithm},float32"


def test_a_transform_is_seen_and_fitted() -> None:
    found = settled("winograd_conv2d", "conv2d")
    assert str(found.arithmetic) == "winograd_f2x2,float32"
    assert found.below == ()
    assert str(settled("einsum_conv2d", "conv2d").arithmetic) == "sum,float32"


def test_an_fft_is_seen_and_fitted() -> None:
    found = settled("fft_conv2d", "conv2d")
    assert str(found.arithmetic) == "transforms,float32"
    assert found.below == ()
    assert any(note.startswith("transforms 3×3 and 5×5 windows") for note in found.notes)


def test_a_call_is_timed_as_a_quick_search_makes_it() -> None:
    quick = profile("quick")
    assert (quick.max_macs, quick.max_elements) == (MOST_MACS, MOST_ELEMENTS)


def test_a_call_of_little_work_does_not_say_how_fast_a_function_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a call takes a millisecond, and 10⁹ products another second."""
    module = sys.modules[settle.__module__]
    monkeypatch.setattr(module, "_call", lambda backend, problem: 1e-3 + problem.macs / 1e9)
    assert settled("numpy:matmul").rate > 0.7e9


HALF_SUMS = Arithmetic("sum", "float32", "float32", "float16")
WHOLE_SUMS = Arithmetic("sum", "float32", "float32", "float32")


@pytest.mark.parametrize(
    ("second", "note", "said"),
    [
        (WHOLE_SUMS, "its sums keep 24 bits", "; it multiplies float32 and sums in float32"),
        (None, "no known arithmetic gives it", "; no known arithmetic gives it. Its results"),
    ],
)
def test_what_a_second_probing_does_not_find_is_not_said(
    monkeypatch: pytest.MonkeyPatch, second: Arithmetic | None, note: str, said: str
) -> None:
    """A function that is wrong now and then looks like one that sums in less."""
    answers = [(HALF_SUMS, ("its sums keep 11 bits",)), (second, (note,))]
    monkeypatch.setattr(settling, "_arithmetic", lambda *arguments: answers.pop(0))
    found = settled("matmul_sequential")
    assert not answers
    assert (found.arithmetic, found.below, found.target.contract) == (None, (), "sum,float32")
    assert "two answers: it multiplies float32 and sums in float16" in found.notes[0]
    assert said in found.notes[0]


WRONG = """
import numpy as np
def matmul(a, b):
    with np.errstate(all="ignore"):
        c = a @ b
    if {when}:
        c[:, -1] = 0
    return c
"""


@pytest.mark.parametrize("when", ["a.shape[1] == 63", "b.shape[1] % 8 == 7"])
def test_a_problem_that_no_known_arithmetic_explains_is_examined(tmp_path: Path, when: str) -> None:
    """A search draws such a problem only by chance, and what the probes saw is not to be lost."""
    file = tmp_path / "wrong_now_and_then.py"
    file.write_text(WRONG.format(when=when))
    found = settled(f"{file}:matmul")
    assert found.arithmetic is None
    assert "no known arithmetic gives what it returned" in found.notes[0]
    assert found.finding is not None
    assert found.finding.check == "exact"
    assert found.finding.got == 0
    checked = check(Target(f"{file}:matmul", "matmul"), How("brief", isolated=False))
    assert checked.findings
    right = replace(checked, findings=())
    assert right.verdict.startswith("right as one that multiplies float32 and sums in float32")
    assert right.verdict.endswith("; what it computes with was not found")


@pytest.mark.parametrize(("first", "asked"), [(HALF_SUMS, 2), (WHOLE_SUMS, 1)])
def test_only_less_than_expected_is_probed_twice(
    monkeypatch: pytest.MonkeyPatch, first: Arithmetic, asked: int
) -> None:
    answers = [(first, ("a note",))] * 2
    monkeypatch.setattr(settling, "_arithmetic", lambda *arguments: answers.pop())
    found = settled("matmul_sequential")
    assert len(answers) == 2 - asked
    assert (found.arithmetic, found.notes) == (first, ("a note",))


def test_a_function_of_multiples_of_8_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of multiples of 8 is probed by sums of 8, 72 and 1152 terms, 16 at a time."""
    module = sys.modules[settle.__module__]
    monkeypatch.setattr(module, "SLOW", np.inf)  # however slow this machine is
    for name, contract in (("of_eight", "sum,float32"), ("of_eight_tf32", TF32)):
        found = settled(name, refuses=f"{HERE}:not_of_eight")
        assert str(found.arithmetic) == contract, found.notes
        assert any("64 products" in note for note in found.notes)


def test_a_function_of_few_outputs_is_not_probed() -> None:
    found = settled("numpy:matmul", refuses=f"{HERE}:more_than_fifteen")
    assert found.arithmetic is None
    assert found.notes == ("takes none of the shapes that the probes pose",)
    assert found.target.contract == "sum,float32"


def test_a_function_of_sixteen_rows_and_columns_is_probed() -> None:
    found = settled("matmul_tf32", refuses=f"{HERE}:more_than_sixteen")
    assert str(found.arithmetic) == TF32
    assert found.notes[-1] == "does not take the sums that would show their order"


def test_long_sums_that_are_refused_are_left_out() -> None:
    """Long sums that a function refuses, as with K = 100, are left out."""
    found = settled("matmul_half_sums", refuses=f"{HERE}:longer_than_100")
    assert str(found.arithmetic) == "sum,float16"


def test_a_function_that_raises_on_a_larger_batch_is_left_to_the_search() -> None:
    def small(a: Any, b: Any) -> Any:
        if len(a) > 8:
            raise ValueError("too many rows")
        return a @ b

    checked_kernels.small = small  # type: ignore[attr-defined]
    found = settled("small")
    assert found.arithmetic is None
    assert found.target.contract == "sum,float32"
    assert "too many rows" in found.notes[0]


def test_a_wrong_result_is_not_called_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_kernels, "widens", lambda x: x * np.float64(2), raising=False)
    monkeypatch.setattr(checked_kernels, "raises", lambda x: x.no, raising=False)
    said = "could not be probed: it returned float64, expected float32 as the input has"
    assert settled("widens", "relu", arrays="numpy").notes == (said,)
    (note,) = settled("raises", "relu", arrays="numpy").notes
    assert note.startswith("could not be probed: it raised AttributeError: ")


# -- the parts -------------------------------------------------------------------------------------


def dots_of(function: Any, like: str = "matmul", dtype: str = "float32") -> list[Dots]:
    kernel = FunctionKernel(
        ("mine", "f"), function, LIKES[like], KINDS["numpy"](), expected_of(LIKES[like], dtype)
    )
    return forms(FunctionBackend(kernel))


def test_a_convolution_is_asked_in_three_forms() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-8, 8, (4, 18)) * 1.0, rng.integers(-8, 8, (3, 18)) * 1.0
    every = dots_of(checked_kernels.einsum_conv2d, "conv2d")
    assert [dots.form.multiple for dots in every] == [9, 1, 1]
    for dots in every:
        np.testing.assert_array_equal(dots(x, w), x @ w.T)


@pytest.mark.parametrize(
    ("name", "depth", "widest"),
    [("matmul_sequential", 62, 2), ("matmul_pairwise", 6, 2), ("matmul_tensor_core", 8, 9)],
)
def test_the_order_of_sums(name: str, depth: int, widest: int) -> None:
    (dots,) = dots_of(getattr(checked_kernels, name))
    arithmetic = settled(name).arithmetic
    assert arithmetic is not None
    order = order_of(dots, arithmetic, (63, 1))
    assert isinstance(order, Order)
    assert (order.terms, order.depth, order.widest) == (63, depth, widest)


def test_an_order_that_depends_on_the_row_is_no_tree() -> None:
    def turned(a: Any, b: Any) -> Any:
        rows = [np.roll(row, i) @ np.roll(b, i, axis=0) for i, row in enumerate(a)]
        return np.stack(rows)

    def one_by_one(a: Any, b: Any) -> Any:
        return np.stack(
            [
                checked_kernels.matmul_sequential(np.roll(row, i)[None], np.roll(b, i, axis=0))[0]
                for i, row in enumerate(a)
            ]
        )

    for function in (turned, one_by_one):
        (dots,) = dots_of(function)
        assert order_of(dots, expected_of(LIKES["matmul"], "float32"), (63, 1)) is None


def test_the_order_of_sums_in_more_bits_than_their_inputs_span() -> None:
    """M hides no ones in such sums, which are no sums without a tree."""

    def in_long_double(a: Any, b: Any) -> Any:
        return _one_by_one(a.astype(np.longdouble), b).astype(a.dtype)

    def exactly(a: Any, b: Any) -> Any:
        rows = [[math.fsum(row * column) for column in b.T.astype(np.float64)] for row in a]
        return np.array(rows).astype(a.dtype)

    (dots,) = dots_of(in_long_double)
    wide = replace(expected_of(LIKES["matmul"], "float32"), sums="float64")
    assert order_of(dots, wide, (63, 1)) == Order(63, 62, 2)
    if np.finfo(np.longdouble).nmant > 52:
        said = "its sums keep 61 or more bits, more than float64"
        assert sums_of(dots, "float32", long=False).words() == said
    (dots,) = dots_of(exactly)
    assert order_of(dots, wide, (63, 1)) == Unseen()
    (dots,) = dots_of(checked_kernels.matmul_double_sums, dtype="float16")
    assert order_of(dots, expected_of(LIKES["matmul"], "float16"), (63, 1)) == Unseen()
    assert sums_of(dots, "float16", long=False).words() == "its sums keep 39 or more bits"
    assert "keep too many bits to show their order" in Unseen().words()


def _one_by_one(a: Any, b: Any) -> Any:
    total = np.zeros((len(a), b.shape[1]), a.dtype)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    return total


def test_subnormals_that_become_zero() -> None:
    def flushed(a: Any, b: Any) -> Any:
        y = a @ b
        return np.where(np.abs(y) < 2.0**-126, 0, y).astype(y.dtype)

    (dots,) = dots_of(flushed)
    assert flushes(dots, "float32", rounded=False)
    (dots,) = dots_of(np.matmul)
    assert not flushes(dots, "float32", rounded=False)


def test_a_sum_that_is_rounded_before_the_bias() -> None:
    def twice(x: Any, w: Any, b: Any) -> Any:
        return (x.astype(np.float32) @ w.T.astype(np.float32)).astype(x.dtype) + b

    def once(x: Any, w: Any, b: Any) -> Any:
        return (x.astype(np.float32) @ w.T.astype(np.float32) + b).astype(x.dtype)

    def twice_alone(x: Any, w: Any, b: Any) -> Any:
        return (twice if len(x) == 1 else once)(x, w, b)

    for function, rounds in ((twice, True), (twice_alone, True), (once, False)):
        (dots,) = with_bias(dots_of(function, "linear", "float16")[0].backend)
        assert rounds_before_bias(dots, "float16") is rounds
