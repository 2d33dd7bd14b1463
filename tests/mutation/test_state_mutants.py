"""Structural mutants: the change of each class, and mutants that tests judge."""

from __future__ import annotations

import shutil
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from r18.backend.registry import installed
from r18.errors import R18Error, UnknownName, UsageError
from r18.records import load
from r18.records.kinds import Mutate
from r18_oracle.mutation.edits import KINDS, STATE
from r18_oracle.mutation.mutants import LANGUAGES, Target, mutants_of
from r18_oracle.mutation.score import Score
from r18_oracle.mutation.tested import Part, mutants_in, parts_of, run_tested

PYTHON = {
    "cache_key": (
        "@cache\ndef f(op, shape):\n    return op\n",
        'for n, v in k.items() if n != "shape"',
    ),
    "wait": (
        "def f(s, x):\n    s.synchronize()\n    y = x[0]\n    return y\n",
        "y = x[0]\ns.synchronize()",
    ),
    "scratch": ("def f(n):\n    x = np.empty(n, d)\n", '_kept", {}).setdefault(str((n, d,))'),
    "loop_rest": ("def f(n):\n    for x in n:\n        g(x)\n", "g(x)\nbreak"),
    "rounding": ("def f(n):\n    return np.rint(n)\n", "return np.trunc(n)"),
    "store_wait": ("def f(a):\n    a.flush()\n", "pass"),
    "resume": (
        "def f(a, done):\n    return [x for x in a if x.name not in done]\n",
        "return [x for x in list(a)[len(list(done)) :] if True]",
    ),
}
CUDA = {
    "wait": (
        "    __syncthreads();\n    a[0] = b[1];\n",
        "a[0] = b[1];\n__syncthreads();",
    ),
    "scratch": ("    f(tiles[stage], n);\n", "f(tiles[0], n);"),
    "loop_rest": ("    for (int i = 0; i < n; ++i) {\n        f(i);\n    }\n", "break; }"),
    "rounding": ("    a[0] = __float2half_rn(b);\n", "a[0] = __float2half_rz(b);"),
    "store_wait": ("    f(n);\n    tma_store_wait<0>();\n", ";"),
}
BACKENDS = ("numpy", "numba-cpu", "numba", "cupy")


@pytest.mark.parametrize("name", STATE)
def test_a_class_changes_python(name: str) -> None:
    source, changed = PYTHON[name]
    found = [m for m in mutants_of("a.py", source) if m.operator == name]
    assert any(changed in m.after for m in found), [m.after for m in found]
    for mutant in found:
        compile(mutant.source, "a.py", "exec")
        assert mutant.kind == "state"


@pytest.mark.parametrize("name", CUDA)
def test_a_class_changes_cuda(name: str) -> None:
    body, changed = CUDA[name]
    source = f"__global__ void k(int n) {{\n{body}}}\n"
    found = [m for m in mutants_of("a.cu", source) if m.operator == name]
    assert any(changed in m.after for m in found), [m.after for m in found]


def test_a_cached_function_that_ignores_an_argument() -> None:
    source, _ = PYTHON["cache_key"]
    for mutant in (m for m in mutants_of("a.py", source) if m.operator == "cache_key"):
        names: dict[str, object] = {}
        exec(mutant.source, names)
        function = names["f"]
        assert callable(function)
        ignored = int('"shape"' in mutant.after)
        assert [function(1, 2), function(1, shape=3)] == [1, 1]
        assert function(4, 2) == (4 if ignored else 1)


def test_there_are_enough_over_all_backends() -> None:
    found: Counter[str] = Counter()
    for backend in BACKENDS:
        assert backend in installed()
        for file, source in Target.of(backend).sources().items():
            edits = LANGUAGES[Path(file).suffix].edits["state"](source)
            found += Counter(operator for operator, *_ in edits)
    assert found.keys() == STATE.keys()
    assert found.total() >= 200


def test_tokens_and_structure_are_apart() -> None:
    source = "def f(n):\n    for x in n:\n        g(x + 1)\n"
    kinds = Counter(m.kind for m in mutants_of("a.py", source))
    assert kinds["tokens"] > 1
    assert kinds["state"] == 1


# -- judged by tests -----------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one function, its test, and the table that names both."""
    package = tmp_path / "site" / "toy_core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "left.py").write_text(
        "def left(items, done):\n    return [x for x in items if x not in done]\n"
    )
    test = tmp_path / "test_left.py"
    test.write_text(
        "from toy_core.left import left\n"
        "def test_what_is_left():\n"
        "    assert left([1, 2, 3], {2}) == [1, 3]\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    path = tmp_path / "core.toml"
    path.write_text(
        f'[[part]]\npackage = "toy_core"\nfiles = ["left.py"]\ntests = ["{test.as_posix()}"]\n'
    )
    return path


def test_tests_judge_a_change(table: Path) -> None:
    score = run_tested(table)
    (result,) = score.results
    assert (result.mutant.operator, result.status) == ("resume", "killed")
    assert result.finding is not None
    assert result.finding.check == "tests"
    assert "test_what_is_left" in result.finding.message


def test_a_part_may_be_for_one_kind_of_mutants(table: Path) -> None:
    with (table.parent / "site/toy_core/left.py").open("a") as file:
        file.write("def first(items):\n    return items[0]\n")
    text = table.read_text()
    every = {m.kind for kind in ("tokens", "state") for m in mutants_in(parts_of(table), kind)}
    assert every == {"tokens", "state"}
    table.write_text(text + 'kinds = ["tokens"]\n')
    assert mutants_in(parts_of(table), "tokens")
    with pytest.raises(UsageError, match="no mutant to run"):
        mutants_in(parts_of(table), "state")
    table.write_text(text + 'kinds = ["token"]\n')
    with pytest.raises(UnknownName, match="kind of mutants 'token'"):
        parts_of(table)


def test_a_result_is_recorded_and_used_again_until_something_changes(
    table: Path, tmp_path: Path
) -> None:
    records, test = tmp_path / "records", table.parent / "test_left.py"
    ran: list[str] = []

    def run(**how: Any) -> Score:
        ran.clear()
        return run_tested(
            table,
            records_folder=records,
            progress=lambda done, total, what: ran.append(what),
            **how,
        )

    first = run()
    (path,) = records.iterdir()
    (recorded,) = load(path, Mutate).backends.values()  # type: ignore[union-attr]
    assert (recorded.killed, recorded.score, len(recorded.results)) == (1, 100.0, 1)
    assert recorded.state == {"resume": {"killed": 1}}
    assert len(ran) == 1
    again = run()
    assert (ran, again.percent) == ([], 100.0)
    assert again.results[0].finding == first.results[0].finding
    assert (run(again="survived").percent, ran) == (100.0, [])
    assert run(again="all").percent == 100.0
    assert len(ran) == 1
    test.write_text("from toy_core.left import left\ndef test_it():\n    assert left([1], [])\n")
    assert run().percent == 0.0
    assert len(ran) == 1
    (recorded,) = load(path, Mutate).backends.values()  # type: ignore[union-attr]
    assert (recorded.survived, recorded.score) == (1, 0.0)
    with pytest.raises(UnknownName, match="set of mutants to run again 'some'"):
        run(again="some")


def test_a_mutant_stays_caught_when_other_tests_are_added(table: Path, tmp_path: Path) -> None:
    """A caught mutant stays caught when tests are added; a survivor is run with them."""
    test = table.parent / "test_left.py"
    other = tmp_path / "test_other.py"
    other.write_text("def test_nothing():\n    pass\n")
    ran: list[str] = []

    def run() -> Score:
        ran.clear()
        progress = lambda done, total, what: ran.append(what)  # noqa: E731
        return run_tested(table, records_folder=tmp_path / "records", progress=progress)

    def judged_by(*tests: Path) -> None:
        names = ", ".join(f'"{one.as_posix()}"' for one in tests)
        table.write_text(
            f'[[part]]\npackage = "toy_core"\nfiles = ["left.py"]\ntests = [{names}]\n'
        )

    run()
    judged_by(test, other)
    assert (run().percent, ran) == (100.0, [])
    judged_by(other)
    assert (run().percent, len(ran)) == (0.0, 1)
    judged_by(other, test)
    assert (run().percent, len(ran)) == (100.0, 1)


def test_files_of_one_name_in_two_packages_are_refused(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "site" / "other_core"
    shutil.copytree(tmp_path / "site" / "toy_core", other)
    text = table.read_text()
    table.write_text(text + text.replace("toy_core", "other_core"))
    with pytest.raises(UsageError, match=r"two packages of the table have a file 'left\.py'"):
        run_tested(table)


def test_tests_must_pass_before(table: Path) -> None:
    (table.parent / "test_left.py").write_text("def test_no():\n    assert False\n")
    with pytest.raises(R18Error, match="must pass before mutants mean anything"):
        run_tested(table)


def test_a_damaged_table_is_refused(table: Path) -> None:
    table.write_text("[[part]]\nfiles = []\n")
    with pytest.raises(UsageError, match="is not a table of parts"):
        run_tested(table)


def test_the_core_s_table_names_sources_and_tests() -> None:
    root = Path(__file__).parents[2]
    parts = parts_of(root / "tests" / "mutation" / "core.toml")
    assert all((root / name.partition("::")[0]).exists() for part in parts for name in part.tests)
    named: dict[Part, set[str]] = {}
    for kind in KINDS:
        for mutant, part in mutants_in(parts, kind).items():
            assert not part.kinds or kind in part.kinds
            named.setdefault(part, set()).add(mutant.file)
    for part in parts:
        for glob in part.files:
            assert any(fnmatchcase(file, glob) for file in named[part]), glob
