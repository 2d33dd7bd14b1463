"""The exact message for each mistake in a backend."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import r18_numpy
from commands import r18
from r18.backend import DeviceInfo, HostKernel, RoundingContract
from r18.backend.registry import asked_module, checked_backend, get_backend
from r18.errors import BackendUnavailable, R18Error, UnknownName, unknown_kernel
from r18.graph.ops import BatchNorm, Conv2d, Linear, Op, Problem, ReLU
from r18.graph.precision import FP32, precision
from r18.runtime.launch import run_kernel
from r18.runtime.plan import fastest_first
from r18_oracle.cli.verify import _print
from r18_oracle.findings import Finding
from r18_oracle.judge.bounds import DERIVATIONS
from r18_oracle.search.profiles import profile
from r18_oracle.search.verify import BackendResult, Request, Verification
from support import ROOT

SOURCE = """\
import numpy as np

from r18.backend import Backend as Base
from r18.backend import DeviceInfo, HostKernel, RoundingContract
from r18.errors import BackendUnavailable
from r18.graph.ops import ReLU
from r18.graph.precision import FP32

CONTRACT = RoundingContract("exact", "float32", "float32")


def run(op, inputs, weights, out, workspace):
    out[...] = np.maximum(inputs[0], 0)


class Backend(Base):
    name = "mine"

    def probe(self):
        return DeviceInfo("cpu", "NumPy")

    def kernels(self):
        return (HostKernel("mine", ReLU, "plain", FP32, CONTRACT, run),)
"""
"""A correct backend; each mistake changes one line of it."""

KERNEL = 'HostKernel("mine", ReLU, "plain", FP32, CONTRACT, run)'
PLAIN = Problem(ReLU(), ((1, 2),))
RELU = HostKernel(
    *("mine", ReLU, "plain", FP32, RoundingContract("exact", "float32", "float32")),
    run=lambda op, inputs, weights, out, workspace: None,
)
HEAD = "backend 'good:Backend' is not available: "


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write the backend as `good.py` in the current folder, with a mistake, and load it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_and_load(right: str = "", wrong: str = "", name: str = "good:Backend") -> None:
        assert not right or SOURCE.count(right) == 1
        Path("good.py").write_text(SOURCE.replace(right, wrong) if right else SOURCE, "utf-8")
        sys.modules.pop("good", None)
        get_backend(name)

    yield write_and_load
    sys.modules.pop("good", None)


def test_the_right_one_loads(load: Callable[..., None]) -> None:
    load()


KERNELS = {
    "precision as a name": (
        "FP32, CONTRACT",
        '"fp32", CONTRACT',
        "precision must be an r18.graph.precision.Precision, not the string 'fp32': use FP32",
    ),
    "no precision": (
        "FP32, CONTRACT",
        '"float", CONTRACT',
        "precision must be an r18.graph.precision.Precision, not the string 'float'",
    ),
    "op as a name": (
        ", ReLU, ",
        ', "Conv2d", ',
        "op must be a class of r18.graph.ops, not 'Conv2d'",
    ),
    "op as an object": (
        ", ReLU, ",
        ", ReLU(), ",
        "op must be a class of r18.graph.ops, not one of its objects: ReLU",
    ),
    "edges as a number": (
        "run),)",
        "run, edges=16),)",
        "edges must be a tuple of integers: (16,)",
    ),
    "edges as text": (
        "run),)",
        'run, edges=("16",)),)',
        "edges must be a tuple of integers, not ('16',)",
    ),
    "extras as one": (
        "run),)",
        'run, extras="groups"),)',
        "extras must be a frozenset of some of 'dilation', 'groups', not 'groups'",
    ),
    "extras of another op": (
        "run),)",
        'run, extras=frozenset({"strides"})),)',
        "extras must be a frozenset of some of 'dilation', 'groups', not frozenset({'strides'})",
    ),
    "one extra problem": (
        "run),)",
        "run, extra_problems=[ReLU()]),)",
        "extra_problems must be a tuple of problems, not [ReLU()]",
    ),
    "contract as text": (
        "CONTRACT, run)",
        '"exact", run)',
        "contract must be a RoundingContract, not the string 'exact'",
    ),
    "contract and run swapped": (
        "CONTRACT, run)",
        "run, CONTRACT)",
        "contract must be a RoundingContract, not a function: are contract and run swapped?",
    ),
    "scratch as a number": (
        "run),)",
        "run, scratch=1024),)",
        "scratch must be a function of the problem: lambda problem: 1024",
    ),
    "pack as a number": (
        "run),)",
        "run, pack=3),)",
        "pack must be a function of the op and weights: lambda op, weights: 3",
    ),
    "pack takes nothing": (
        "run),)",
        "run, pack=lambda: ()),)",
        "r18 calls pack(op, weights), and this one is <lambda>()",
    ),
    "layout as text": (
        "run),)",
        'run, layout="nhwc"),)',
        "layout must be Layout.NCHW or Layout.NHWC, not the string 'nhwc'",
    ),
    "algorithm with a slash": (
        '"plain"',
        '"plain/fast"',
        "the name of its algorithm may not be empty or contain '/' or spaces: 'plain/fast'",
    ),
    "run takes four": (
        "out, workspace):",
        "out):",
        "r18 calls run(op, inputs, weights, out, workspace), and this one is "
        "run(op, inputs, weights, out)",
    ),
    "run is no function": (
        "CONTRACT, run)",
        "CONTRACT, 7)",
        "run must be a function, not 7: r18 calls run(op, inputs, weights, out, workspace)",
    ),
}


@pytest.mark.parametrize("mistake", KERNELS)
def test_a_kernel_that_cannot_be_made(load: Callable[..., None], mistake: str) -> None:
    right, wrong, message = KERNELS[mistake]
    name = "plain/fast" if "slash" in mistake else "plain"
    with pytest.raises(BackendUnavailable) as caught:
        load(right, wrong)
    assert str(caught.value) == (
        f"{HEAD}kernels() raised HostKernel '{name}': {message}\n"
        "  This is a fault of that plugin, in kernels (good.py:23)."
    )


BACKENDS = {
    "probe returns a string": (
        'return DeviceInfo("cpu", "NumPy")',
        'return "cpu"',
        "probe() must return a DeviceInfo, not the string 'cpu'\n"
        "  Write DeviceInfo(\"cpu\", 'cpu').",
    ),
    "probe returns nothing": (
        'return DeviceInfo("cpu", "NumPy")',
        'DeviceInfo("cpu", "NumPy")',
        "probe() must return a DeviceInfo, not None: is a return missing?\n"
        '  Write return DeviceInfo("cpu", "its name").',
    ),
    "unavailable without a cause": (
        'return DeviceInfo("cpu", "NumPy")',
        'raise BackendUnavailable("no GPU")',
        "probe() raised TypeError: BackendUnavailable takes the backend's name, the cause and a "
        "remedy: BackendUnavailable(self.name, 'no GPU', 'what to do')\n"
        "  This is a fault of that plugin, in probe (good.py:20).",
    ),
    "probe needs a package": (
        'return DeviceInfo("cpu", "NumPy")',
        "import nobody_has_this.inside",
        "probe() raised ModuleNotFoundError: No module named 'nobody_has_this'\n"
        "  Install the package that provides nobody_has_this, or the extra that brings it.",
    ),
    "kernels returns nothing": (
        f"return ({KERNEL},)",
        f"({KERNEL},)",
        "kernels() must return a tuple of kernels, not None: is a return missing?\n"
        "  Return a tuple.",
    ),
    "kernels returns one": (
        f"({KERNEL},)",
        f"({KERNEL})",
        "kernels() must return a tuple of kernels, not one HostKernel\n"
        "  Write a comma after it: return (kernel,).",
    ),
    "kernels returns a generator": (
        f"return ({KERNEL},)",
        f"return ({KERNEL} for _ in range(1))",
        "kernels() of 'mine' returned a generator, which can be read only once\n"
        "  Return a tuple of it.",
    ),
    "kernels returns a dict": (
        f"({KERNEL},)",
        "{}",
        "kernels() must return a tuple of kernels, not a dict\n  Return a tuple.",
    ),
    "kernels raises": (
        f"return ({KERNEL},)",
        "return 1 / 0",
        "kernels() raised ZeroDivisionError: division by zero\n"
        "  This is a fault of that plugin, in kernels (good.py:23).",
    ),
    "a method misspelled": (
        "def kernels(",
        "def kernel(",
        "class Backend defines no 'kernels'; it has 'kernel': rename it?\n"
        "  r18.backend.protocol says what each one returns.",
    ),
    "two methods missing": (
        "def probe(self):\n"
        '        return DeviceInfo("cpu", "NumPy")\n\n'
        "    def kernels(self):\n"
        f"        return ({KERNEL},)",
        "pass",
        "class Backend defines no 'kernels' and no 'probe'\n"
        "  r18.backend.protocol says what each one returns.",
    ),
    "not inherited": (
        "class Backend(Base):",
        "class Backend:",
        "class Backend does not inherit r18.backend.Backend\n"
        "  Write class Backend(r18.backend.Backend).",
    ),
    "needs arguments": (
        "    def probe(self):",
        "    def __init__(self, device):\n        pass\n\n    def probe(self):",
        "Backend must be callable without arguments, and takes device\n"
        "  Give each a default, or name a function that returns a backend.",
    ),
    "raises when it is made": (
        "    def probe(self):",
        "    def __init__(self):\n        int('x')\n\n    def probe(self):",
        "Backend() raised ValueError: invalid literal for int() with base 10: 'x'\n"
        "  This is a fault of that plugin, in __init__ (good.py:20).",
    ),
    "no name": (
        'name = "mine"',
        "pass",
        "class Backend has no 'name'\n  Write name = \"mine\" in its body.",
    ),
    "a name with a space": (
        'name = "mine"',
        'name = "My Backend"',
        "the name 'My Backend' of class Backend may only have letters, digits and . _ + -\n"
        '  It is a part of kernel ids and options: write name = "my-backend".',
    ),
    "a syntax error": (
        "import numpy as np",
        "import numpy as",
        "SyntaxError: invalid syntax (good.py, line 1), in good.py:1\n"
        "  This is a fault of that plugin; to see the whole traceback: python -c 'import good'",
    ),
    "an error at import": (
        "import numpy as np",
        "import numpy as np; np.zeros(-1)",
        "ValueError: negative dimensions are not allowed, in good.py:1\n"
        "  This is a fault of that plugin; to see the whole traceback: python -c 'import good'",
    ),
    "a missing package": (
        "import numpy as np",
        "import nobody_has_this",
        "ModuleNotFoundError: No module named 'nobody_has_this', in good.py:1\n"
        "  Install the package that provides nobody_has_this, or the extra that brings it.",
    ),
}


@pytest.mark.parametrize("mistake", BACKENDS)
def test_a_backend_that_cannot_be_used(load: Callable[..., None], mistake: str) -> None:
    right, wrong, message = BACKENDS[mistake]
    with pytest.raises(BackendUnavailable) as caught:
        load(right, wrong)
    assert str(caught.value) == HEAD + message


OWN = """
class Own(Kernel):
    id = "mine/relu/own/fp32"
    op = ReLU
    algorithm = "own"
    precision = FP32
    contract = CONTRACT

    def prepare(self, problem, weights):
        return ()

    def enqueue(self, problem, inputs, weights, output, workspace, stream):
        pass
"""
"""A kernel that inherits the protocol alone; each mistake changes one line of it."""

FIELDS = {
    "no id": ('id = "mine/relu/own/fp32"', "pass", "'id' is missing"),
    "id as a number": (
        'id = "mine/relu/own/fp32"',
        "id = 5",
        "id must be a string that is not empty, not 5",
    ),
    "op as a name": (
        "op = ReLU",
        'op = "relu"',
        "op must be a class of r18.graph.ops, not 'relu'",
    ),
    "no algorithm": ('algorithm = "own"', "pass", "'algorithm' is missing"),
    "precision as its name": (
        "precision = FP32",
        'precision = "fp32"',
        "precision must be an r18.graph.precision.Precision, not the string 'fp32': use FP32",
    ),
    "no contract": ("contract = CONTRACT", "pass", "'contract' is missing"),
    "edges as text": (
        "op = ReLU",
        'op, edges = ReLU, "abc"',
        "edges must be a tuple of integers, not 'abc'",
    ),
    "reads as a number": (
        "op = ReLU",
        "op, reads = ReLU, 1",
        "reads must be Layout.NCHW or Layout.NHWC, not 1",
    ),
}


@pytest.mark.parametrize("how", [get_backend, checked_backend])
@pytest.mark.parametrize("mistake", FIELDS)
def test_a_field_that_a_kernel_of_ones_own_lacks(
    load: Callable[..., None], mistake: str, how: Callable[[str], Any]
) -> None:
    right, wrong, message = FIELDS[mistake]
    assert OWN.count(right) == 1
    load("import DeviceInfo, HostKernel,", "import DeviceInfo, HostKernel, Kernel,")
    own = OWN.replace(right, wrong)
    source = Path("good.py").read_text("utf-8").replace(KERNEL, "Own()")
    source = source.replace("class Backend(", f"{own}\n\nclass Backend(")
    Path("good.py").write_text(source, "utf-8")
    sys.modules.pop("good", None)
    with pytest.raises(BackendUnavailable) as caught:
        how("good:Backend")
    assert str(caught.value) == (
        f"{HEAD}kernel Own: {message}\n  r18.backend.Kernel says what each field is."
    )


NAMES = {
    "good2:Backend": (
        "backend 'good2:Backend' is not available: no module 'good2' in the current folder or on "
        "sys.path\n  Did you mean good:Backend?"
    ),
    "zzz.yyy:Backend": (
        "backend 'zzz.yyy:Backend' is not available: no module 'zzz' in the current folder or on "
        "sys.path\n  Run r18 in the folder of the module."
    ),
    "good:Backed": (
        "backend 'good:Backed' is not available: good has no 'Backed', did you mean 'Backend'?\n"
        "  Its backends: Backend."
    ),
    "json:Backend": (
        "backend 'json:Backend' is not available: json has no 'Backend'\n  It defines no backend."
    ),
    "good:run": (
        "backend 'good:run' is not available: run must be callable without arguments, and takes "
        "op, inputs, weights, out, workspace\n"
        "  Give each a default, or name a function that returns a backend."
    ),
    "good:CONTRACT": (
        "backend 'good:CONTRACT' is not available: RoundingContract(algorithm='exact', "
        "accumulate='float32', output='float32', t…0) is no backend\n"
        "  Name a class that inherits r18.backend.Backend, or a function that returns one."
    ),
    "good.py:Backend": "'good.py:Backend' names a file: write good:Backend",
    "./good.py:Backend": "'./good.py:Backend' names a file: write good:Backend",
    "/x/good.py:B": "'/x/good.py:B' names a file: run r18 in /x and write good:B",
    "../good:B": "'../good:B' names a file: run r18 in .. and write good:B",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_names_no_backend(load: Callable[..., None], name: str) -> None:
    with pytest.raises(R18Error) as caught:
        load(name=name)
    assert str(caught.value) == NAMES[name]


@pytest.mark.parametrize("name", ["good", "good.py", "./good.py"])
def test_a_file_in_the_current_folder(load: Callable[..., None], name: str) -> None:
    with pytest.raises(UnknownName) as caught:
        load(name=name)
    hint = "For the file good.py in the current folder, write good:Backend."
    assert str(caught.value).splitlines()[-1].strip() == hint


@pytest.mark.parametrize("answer", [False, True, 3, ""])
def test_a_refusal_is_none_or_a_sentence(answer: object) -> None:
    kernel = replace(RELU, refuses=lambda problem: answer)  # type: ignore[arg-type, return-value]
    with pytest.raises(R18Error) as caught:
        kernel.refusal(PLAIN)
    assert str(caught.value) == (
        "HostKernel 'plain': refuses must return None (accepted) or a sentence (why not), "
        f"not {answer!r}"
    )


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("float32", "fp32"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float64", "fp64"),
        ("Half", "fp16"),
        ("fp23", "fp32"),
    ],
)
def test_a_formats_name_means_a_precision(asked: str, meant: str) -> None:
    with pytest.raises(UnknownName) as caught:
        precision(asked)
    assert str(caught.value).splitlines()[0] == (
        f"unknown precision '{asked}', did you mean '{meant}'?"
    )


SCRATCH: dict[object, str] = {
    -5: "-5",
    2.5: "2.5",
    "5": "the string '5'",
    None: "None: is a return missing?",
}


@pytest.mark.parametrize("answer", SCRATCH)
def test_scratch_is_a_number_of_bytes(answer: object) -> None:
    kernel = replace(RELU, scratch=lambda problem: answer)  # type: ignore[arg-type, return-value]
    with pytest.raises(R18Error) as caught:
        kernel.workspace(PLAIN)
    assert str(caught.value) == (
        f"HostKernel 'plain': scratch must return a number of bytes, 0 or more, "
        f"not {SCRATCH[answer]}"
    )
    assert replace(RELU, scratch=lambda problem: np.int64(8)).workspace(PLAIN) == 8  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("packed", "said"), [(None, "None: is a return missing?"), (np.ones(3), "one array"), (3, "3")]
)
def test_pack_returns_a_tuple_of_arrays(packed: object, said: str) -> None:
    kernel = replace(RELU, pack=lambda op, weights: packed)  # type: ignore[arg-type, return-value]
    with pytest.raises(R18Error) as caught:
        kernel.prepare(PLAIN, ())
    assert (
        str(caught.value) == f"HostKernel 'plain': pack must return a tuple of arrays, not {said}"
    )


def test_the_fastest_kernel_is_not_its_id() -> None:
    class Text(r18_numpy.Backend):
        def fastest(self, problem: Problem, precision: str) -> Any:
            return "mine/conv2d/plain/fp32"

    with pytest.raises(R18Error) as caught:
        fastest_first(Text(), (RELU,), PLAIN, "fp32")
    assert str(caught.value) == (
        "fastest() of backend 'numpy' must return a Preferred, an Apart or None, not "
        "'mine/conv2d/plain/fp32': write Preferred('mine/conv2d/plain/fp32')"
    )


def test_a_backend_without_kernels_has_none_that_match() -> None:
    assert str(unknown_kernel("*", [])) == "no kernel matches '*': kernels() returned no kernel"


def test_an_op_or_an_algorithm_becomes_a_glob() -> None:
    ids = ["mine/conv2d/plain/fp32", "mine/relu/plain/fp32"]
    for part in ("conv2d", "plain"):
        assert str(unknown_kernel(part, ids)) == (
            f"unknown kernel '{part}', did you mean '*/{part}/*'?\n"
            "  known: mine/conv2d/plain/fp32, mine/relu/plain/fp32\n"
            "  A glob over ids works too."
        )


def test_the_listing_shows_the_module_that_the_variable_names(
    load: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module that `R18_BACKEND` names is listed below the table of installed backends."""
    load()
    monkeypatch.setenv("R18_BACKEND", "good:Backend")
    assert "\n\nR18_BACKEND=good:Backend: NumPy\n" in r18("backends").out
    monkeypatch.setenv("R18_BACKEND", "good:Backed")
    asked = asked_module()
    assert asked is not None
    assert asked.device is None
    assert asked.cause == "good has no 'Backed', did you mean 'Backend'?"
    monkeypatch.setenv("R18_BACKEND", "good.py:Backend")
    asked = asked_module()
    assert asked is not None
    assert asked.cause == "'good.py:Backend' names a file: write good:Backend"
    monkeypatch.setenv("R18_BACKEND", "numpy")
    assert asked_module() is None


def test_findings_with_one_cause_are_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Findings with one cause are printed once; each has a file, and other messages stay apart."""

    def finding(kernel: str, check: str, message: str) -> Finding:
        return Finding(check, "mine", kernel, None, "none", 0, message)

    found = [finding(name, "runs", "raised X") for name in ("a", "b", "c")]
    found += [finding("d", "runs", "raised Y"), finding("e", "bound", "raised X")]
    result = BackendResult("mine", DeviceInfo("cpu", "NumPy"), findings=found)
    _print(Verification(Request(profile("quick")), [result]), tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 5
    assert [line for line in out.splitlines() if ": raised" in line] == [
        "a: runs: raised X",
        "d: runs: raised Y",
        "e: bound: raised X",
    ]
    assert "  and 2 more kernels: b, c\n" in out


# -- what the guide promises -------------------------------------------------------------------


def test_run_gets_what_the_guide_says() -> None:
    """`run` gets C-contiguous arrays in the storage format, weights in order, and the workspace."""
    seen: list[Problem] = []

    def run(op: Op, inputs: Any, weights: Any, out: Any, workspace: Any) -> str:
        for array in (*inputs, *weights, out, workspace):
            assert isinstance(array, np.ndarray)
            assert array.flags.c_contiguous
        assert {array.dtype for array in (*inputs, *weights, out)} == {np.dtype(np.float32)}
        assert (workspace.dtype, workspace.shape) == (np.dtype(np.uint8), (24,))
        problem = Problem(op, tuple(array.shape for array in inputs))
        assert out.shape == problem.output
        if isinstance(op, Linear):
            assert [array.shape for array in weights] == [(4, 3), (4,)]
        elif isinstance(op, BatchNorm):
            assert [float(array[0]) for array in weights] == [0, 1, 2, 3]
        else:
            assert [array.shape for array in weights] == [(4, 3, 2, 1), (4,)][: len(weights)]
        seen.append(problem)
        return "ignored"

    rule = RoundingContract("exact", "float32", "float32")
    image = (2, 3, 5, 4)
    for problem in (
        Problem(Conv2d(3, 4, (2, 1)), (image,)),
        Problem(Conv2d(3, 4, (2, 1), bias=True), (image,)),
        Problem(BatchNorm(3), (image,)),
        Problem(Linear(3, 4), ((2, 3),)),
    ):
        kernel = HostKernel(
            "mine", type(problem.op), "plain", FP32, rule, run, scratch=lambda problem: 24
        )
        specs = problem.op.weights()
        roles = ["weight", "bias", "running_mean", "running_var"]
        weights = [np.full(spec.shape, roles.index(spec.role), np.float32) for spec in specs]
        given = [np.ones(shape, np.float32) for shape in problem.inputs]
        run_kernel(r18_numpy.Backend(), kernel, problem, *given, *weights)
        assert seen[-1] == problem
        assert hash(problem.op) == hash(replace(problem.op))


def test_the_guide_names_every_contract_rule() -> None:
    text = (ROOT / "docs" / "write-your-backend.md").read_text("utf-8")
    (bullet,) = (part for part in text.split("\n- **") if part.startswith("The contract"))
    assert set(re.findall(r"`(\w+)`", bullet)) == set(DERIVATIONS)


RAISING = """\
from dataclasses import replace

import r18_numpy


def broken(*arguments):
    return arguments[1000] if "WHAT" != "run" else open("compiler")


class Backend(r18_numpy.Backend):
    name = "good"

    def kernels(self):
        return tuple(
            replace(kernel, backend="good", WHAT=broken) if kernel.op.name == "linear" else kernel
            for kernel in super().kernels()
        )
"""


@pytest.mark.parametrize("what", ["run", "scratch", "refuses", "pack"])
def test_an_exception_of_a_kernels_code_names_kernel_problem_and_line(
    load: Callable[..., None], what: str, tmp_path: Path
) -> None:
    load()
    Path("good.py").write_text(RAISING.replace("WHAT", what), "utf-8")
    sys.modules.pop("good", None)
    done = r18("dump", "--backend", "good:Backend", "--network", "tiny", "--out", tmp_path / "d")
    assert done.code == 2
    kernel = "good/linear/matmul/fp32"
    raised = "IndexError in broken (good.py:7): tuple index out of range"
    if what == "run":
        raised = "FileNotFoundError in broken (good.py:7): [Errno 2] No such file or directory: "
        raised += "'compiler'"
    assert done.err.endswith(
        f"r18: kernel {kernel} raised {raised}\n"
        "  its problem: linear(in_features=64, out_features=10) 1×64 → 1×10\n"
        f"  r18 verify --kernels '{kernel}', with the same --backend, finds the smallest problem "
        "that shows it\n"
    )
    assert not (tmp_path / "d").exists()


def test_tuning_names_the_kernel_that_raises(load: Callable[..., None], tmp_path: Path) -> None:
    load()
    Path("good.py").write_text(RAISING.replace("WHAT", "refuses"), "utf-8")
    sys.modules.pop("good", None)
    asked = ("--backend", "good:Backend", "--network", "tiny", "--out", tmp_path / "t.json")
    done = r18("tune", *asked)
    assert done.code == 2
    assert "r18: kernel good/linear/matmul/fp32 raised IndexError in broken" in done.err


@pytest.mark.parametrize("notes", ["None", "property(lambda self: 1 // 0)"])
def test_an_exception_whose_notes_cannot_be_read_keeps_its_type(
    load: Callable[..., None], notes: str
) -> None:
    load()
    raising = RAISING.replace("WHAT", "run").replace(
        'return arguments[1000] if "run" != "run" else open("compiler")', "raise Odd"
    )
    odd = f"class Odd(Exception):\n    __notes__ = {notes}\n\n\ndef broken("
    Path("good.py").write_text(raising.replace("def broken(", odd), "utf-8")
    sys.modules.pop("good", None)
    backend = get_backend("good:Backend")
    kernel = next(k for k in backend.kernels() if k.id == "good/linear/matmul/fp32")
    arrays = (np.zeros(shape, np.float32) for shape in ((1, 2), (3, 2), (3,)))
    raised = ""
    try:  # pytest itself would read the notes
        run_kernel(backend, kernel, Problem(Linear(2, 3), ((1, 2),)), *arrays)
    except Exception as error:
        raised = type(error).__name__
    assert raised == "Odd"


def test_an_exception_keeps_its_type_and_gets_one_note() -> None:
    def run(op: Any, inputs: Any, weights: Any, out: Any, workspace: Any) -> None:
        raise ZeroDivisionError("by nothing")

    class Failing(r18_numpy.Backend):
        def kernels(self) -> tuple[HostKernel, ...]:
            return (replace(RELU, run=run),)

    with pytest.raises(ZeroDivisionError, match="by nothing") as caught:
        run_kernel(Failing(), Failing().kernels()[0], PLAIN, np.zeros((1, 2), np.float32))
    (note,) = caught.value.__notes__
    assert note.startswith("kernel mine/relu/plain/fp32 raised ZeroDivisionError in run (test_")
    assert "): by nothing\n  its problem: relu() 1×2 → 1×2\n" in note


PARTS = {
    "memory without a decorator": (
        "def memory(self):\n        return None",
        "memory must be an r18.backend.device.Memory, not a method\n"
        "  Write @cached_property above it.",
    ),
    "memory of another kind": (
        "memory = 64",
        "memory must be an r18.backend.device.Memory, not 64\n"
        "  Inherit it: its defaults are part of the protocol.",
    ),
    "memory that is None": (
        "memory = None",
        "memory must be an r18.backend.device.Memory, not None\n"
        "  Inherit it: its defaults are part of the protocol.",
    ),
    "memory of an object": (
        "def __init__(self):\n        self.memory = 64",
        "memory must be an r18.backend.device.Memory, not 64\n"
        "  Inherit it: its defaults are part of the protocol.",
    ),
    "a stream that cannot be called": (
        "def __init__(self):\n        self.stream = 3",
        "stream() raised TypeError: 'int' object is not callable\n"
        "  This is a fault of that plugin.",
    ),
    "no stream": (
        "def stream(self):\n        self.made = 1",
        "stream() must return an r18.backend.device.Stream, not None: is a return missing?\n"
        "  Inherit it: its defaults are part of the protocol.",
    ),
    "a stream that raises": (
        "def stream(self):\n        return 1 // 0",
        "stream() raised ZeroDivisionError: integer division or modulo by zero\n"
        "  This is a fault of that plugin, in stream (good.py:19).",
    ),
}


@pytest.mark.parametrize("mistake", PARTS)
def test_a_memory_or_a_stream_of_the_wrong_kind(load: Callable[..., None], mistake: str) -> None:
    code, message = PARTS[mistake]
    with pytest.raises(BackendUnavailable) as caught:
        load('    name = "mine"\n', f'    name = "mine"\n    {code}\n')
    assert str(caught.value) == HEAD + message
