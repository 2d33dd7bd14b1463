"""Targets: their names, and loading what they name."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import checked_kernels
from r18.errors import BackendUnavailable, UnknownName, UsageError
from r18.graph.ops import BatchNorm, Conv2d, Problem
from r18.graph.precision import dtype_of
from r18_oracle.functions.arithmetic import (
    DTYPES,
    SUMS,
    TRANSFORMS,
    Arithmetic,
    arithmetic_of,
    expected_of,
)
from r18_oracle.functions.arrays import NumPyArrays
from r18_oracle.functions.backend import FunctionKernel
from r18_oracle.functions.likes import LIKES
from r18_oracle.functions.target import (
    Target,
    backend_of,
    function_at,
    is_target,
    like_named,
    marked_in,
    place_of,
)
from r18_oracle.generate.inputs import make_case
from r18_oracle.judge.reference import reference
from r18_oracle.judge.verdict import judge

HERE = str(Path(checked_kernels.__file__))


def test_a_name_is_the_whole_target() -> None:
    for target in (
        Target("my_kernels.py:conv2d", "conv2d"),
        Target("a b/my.py:Outer.f", "softmax", "float16", "numpy", "softmax,float32"),
        Target("my.py:f", "relu", refuses="my.py:refuses", deterministic=False),
        Target("torch:matmul", "matmul", contract="sum,float32,factors=tf32,truncates"),
    ):
        assert is_target(target.name)
        assert Target.of(target.name) == target


@pytest.mark.parametrize("name", ["numpy", "check:f", "check:f?like=conv2d&more=1", "x:Backend"])
def test_other_names_are_no_targets(name: str) -> None:
    with pytest.raises(UsageError, match="no target of `r18 check`"):
        Target.of(name)


def test_wrong_options_are_errors() -> None:
    for options, said in (
        ({"dtype": "float8"}, "format of arrays"),
        ({"arrays": "jax"}, "kind of arrays"),
        ({"contract": "winograd"}, "no contract of"),
        ({"contract": "sum,float32,shaky"}, "no part of a contract"),
        ({"contract": "fp16"}, "stores float16"),
        (
            {"like": "batch_norm", "contract": "batchnorm,float16"},
            "'batchnorm,float16' of float32 arrays has no bound: batch_norm's eps of 1e-05 is lost "
            "in float16",
        ),
        ({"like": "conv2d", "contract": "transforms,float16"}, "has no bound: transforms are of"),
    ):
        with pytest.raises(UsageError, match=said):
            Target("f.py:f", **{"like": "matmul"} | options)


SMALL = {
    "conv2d": Problem(Conv2d(3, 2, (3, 3)), ((1, 3, 4, 4),)),
    "batch_norm": Problem(BatchNorm(3), ((1, 3, 2, 2),)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_contracts_are_taken_that_have_a_bound(name: str, dtype: str) -> None:
    like, problem = LIKES[name], SMALL[name]
    algorithms = (*like.algorithms, *(TRANSFORMS if name == "conv2d" else ()))
    for algorithm, sums, factors, cut in product(
        algorithms, SUMS, (dtype, "tf32", "fp16x2"), (False, True)
    ):
        one = Arithmetic(algorithm, dtype, factors, sums, truncates=cut)
        kernel = FunctionKernel(("mine", "f"), abs, like, NumPyArrays(), one)
        case = make_case(kernel, problem, "normal", 0)
        try:
            judge(case, one.contract, reference(problem, *case.wide()).astype(dtype_of(dtype)))
        except UsageError:
            with pytest.raises(UsageError, match="has no bound"):
                arithmetic_of(str(one), like, dtype)
        else:
            assert arithmetic_of(str(one), like, dtype) == one


def test_contracts_have_a_text() -> None:
    like = LIKES["matmul"]
    expected = expected_of(like, "float32")
    for one in (
        expected,
        replace(expected, factors="tf32", truncates=True),
        replace(expected, sums="float16", stored_sum=True, flushes=True),
    ):
        assert arithmetic_of(str(one), like, "float32") == one
    assert str(expected) == "sum,float32"
    assert arithmetic_of("tf32", like, "float32").factors == "tf32"


def test_what_is_below_what_is_expected() -> None:
    expected = expected_of(LIKES["matmul"], "float32")
    assert expected.below(expected) == ()
    assert replace(expected, sums="float64").below(expected) == ()
    assert replace(expected, factors="tf32").below(expected) == ("multiplies in tf32",)
    assert replace(expected, sums="float16").below(expected) == ("sums in float16",)
    half = expected_of(LIKES["matmul"], "float16")
    assert half.sums == "float32"
    norm = expected_of(LIKES["batch_norm"], "float32")
    fitted = replace(norm, sums="bfloat16")  # its errors are known, and not where they come from
    said = "exceeds the bound of float32 and is within that of bfloat16"
    assert fitted.below(norm) == (said,)
    assert fitted.words() == "stays within the bound of bfloat16, rounded to nearest"
    assert replace(half, truncates=True).below(half) == ()  # as tensor cores do


def test_precisions_keep_vectors_as_arrays() -> None:
    """A bias has the arrays' format, while a backend's has the accumulator's."""
    half = expected_of(LIKES["conv2d"], "float16").precision
    assert (half.name, half.vectors) == ("fp16", "float16")
    narrow = Arithmetic("sum", "float32", "bfloat16", "float16").precision
    assert narrow.name == "float32-bfloat16-float16"


def test_functions_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert function_at(f"{HERE}:einsum_conv2d") is checked_kernels.einsum_conv2d
    assert place_of(checked_kernels.einsum_conv2d) == f"{HERE}:einsum_conv2d"
    assert place_of(lambda x: x) is None
    (tmp_path / "mine.py").write_text("import os\nclass A:\n    def relu(x): return x\n")
    monkeypatch.chdir(tmp_path)
    assert callable(function_at("mine.py:A.relu"))
    assert backend_of(Target("mine.py:A.relu", "relu").name).kernel.id == "mine/relu/A.relu/fp32"


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("def relu(x): ...", "other.py:relu", r"no file .* did you mean 'kernels.py'"),
        ("def relu(x): ...", "kernels.py:rellu", "has no 'rellu', did you mean 'relu'"),
        ("relu = 3", "kernels.py:relu", "no function"),
        ("import no_such_module", "kernels.py:relu", "ModuleNotFoundError"),
        ("", "kernels.py", "of the form"),
    ],
)
def test_what_cannot_be_loaded(
    text: str, place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    asked = place.replace("other", "kernel") if "other" in place else place
    with pytest.raises((UsageError, BackendUnavailable), match=said):
        function_at(str(tmp_path / asked) if ":" in place else place)


def test_the_operator_is_the_name_unless_it_is_given() -> None:
    assert like_named("a.py:conv2d", None).name == "conv2d"
    assert like_named("a.py:f", "softmax").name == "softmax"
    with pytest.raises(UsageError, match="named after no operator: give --like"):
        like_named("a.py:f", None)
    with pytest.raises(UnknownName):
        like_named("a.py:f", "conv4d")


def test_marked_functions(tmp_path: Path) -> None:
    (tmp_path / "marked.py").write_text(
        "import r18\n"
        "@r18.check.kernel(like='relu', arrays='numpy')\n"
        "def positive(x): return x.clip(0)\n"
        "def other(x): return x\n"
    )
    assert marked_in(str(tmp_path / "marked.py")) == {
        "positive": {"like": "relu", "arrays": "numpy"}
    }
