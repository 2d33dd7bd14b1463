"""Mutation: the operators, the judged mutants, and a sample of NumPy's kernels, all caught."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import r18_numpy
from r18 import records
from r18.backend.registry import load_backend
from r18.cli.app import FOUND
from r18.errors import BackendUnavailable, R18Error, UnknownName, UsageError
from r18_oracle.cli.mutate import mutate
from r18_oracle.findings import Finding
from r18_oracle.mutation import equivalents
from r18_oracle.mutation import run as running
from r18_oracle.mutation.edits.python import OPERATORS
from r18_oracle.mutation.mutants import LANGUAGES, Mutant, Target, mutants_of, sample
from r18_oracle.mutation.plan import Pace, Plan, eager, patience
from r18_oracle.mutation.process import Ended
from r18_oracle.mutation.reach import reach, reaching
from r18_oracle.mutation.run import run
from r18_oracle.mutation.score import Score
from r18_oracle.mutation.tested import NAME as CORE
from r18_oracle.mutation.tested import parts_of, reasons_in
from r18_oracle.mutation.trial import LATE, Question, tidied, trial
from r18_oracle.search.profiles import profile
from r18_oracle.search.worker import Job, Pool

TOY = "mutation_toy:Backend"
SAMPLE_SEED = 4
SOURCES = Path(r18_numpy.__file__).parent


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.fixture
def quick_runs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs use a worker that is already warm."""
    monkeypatch.setattr(running, "Pool", lambda workers, threads: nullcontext(pool))


@pytest.fixture(scope="module")
def numpy_plan() -> Plan:
    return Plan.of("numpy")


def becomes(source: str, operator: str) -> list[str]:
    """The changes of a line by one operator."""
    return [m.after for m in mutants_of("a.py", source) if m.operator == operator]


# -- the operators -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        ("index", "a[1]", ["a[2]", "a[0]"]),
        ("index", "a[0, i]", ["a[1, i]"]),
        ("index", "a[-1]", ["a[0]", "a[-2]"]),
        ("index", "a[p:]", ["a[p + 1:]", "a[p - 1:]", "a[p:-1]"]),
        ("index", "a[:n]", ["a[1:n]", "a[:n + 1]", "a[:n - 1]"]),
        ("bound", "range(n)", ["range(n + 1)", "range(n - 1)"]),
        ("bound", "min(a, b)", ["max(a, b)"]),
        ("bound", "a < b", ["a <= b"]),
        ("bound", "a >= b", ["a > b"]),
        ("stride", "a[b:c:d]", ["a[b:c]"]),
        ("stride", "range(a, b, c)", ["range(a, b)"]),
        ("axes", "f((a, b, 1))", ["f((b, a, 1))", "f((a, 1, b))"]),
        ("axes", "a[i, j]", ["a[j, i]"]),
        ("axes", "ph, pw = p", ["pw, ph = p"]),
        ("axes", "f(axis=(2, 3))", []),
        (
            "axes",
            "np.einsum('oc,n->on', a)",
            ["np.einsum('co,n->on', a)", "np.einsum('oc,n->no', a)"],
        ),
        ("constant", "a = 0", ["a = 1"]),
        ("constant", "a = 2", ["a = 3", "a = 1"]),
        ("constant", "a = 0.5", ["a = 1.0", "a = 0.0"]),
        ("constant", "f(keepdims=True)", ["f(keepdims=False)"]),
        ("constant", "a = np.inf", ["a = 0"]),
        ("arithmetic", "a + b", ["a", "b", "a - b"]),
        (
            "arithmetic",
            "a * (b - 1)",
            ["(b - 1)", "a", "a * (b)", "a + (b - 1)", "a * (b + 1)"],
        ),
        ("arithmetic", "-a", ["a"]),
        ("arithmetic", "a /= b", ["a *= b"]),
        ("accumulator", "a += b", ["a[...] = b", "a = b"]),
        ("accumulator", "a[i] += b", ["a[i] = b"]),
        ("accumulator", "a[...] = b", ["a[...] += b"]),
        ("statement", "f(x)", ["pass"]),
        ("statement", "a[...] = b", ["pass"]),
        ("statement", "a = b", []),
        ("statement", "a[0] = b[0] = 1", ["pass", "b[0] = 1", "a[0] = 1"]),
        ("comparison", "a == b", ["a != b"]),
        ("condition", "x = a if c else b", ["x = a", "x = b"]),
        ("condition", "a and b", ["a or b"]),
        ("argument", "f(a, b, a)", ["f(b, a, a)", "f(a, a, b)"]),
        ("argument", "np.maximum(a, b)", []),
        ("keyword", "f(a, axis=1)", ["f(a)"]),
        ("function", "np.sqrt(a)", ["a"]),
        ("function", "a.T", ["a"]),
        ("function", "a.mean()", ["a.max()", "a.sum()"]),
        ("function", "align(n)", ["n"]),
    ],
)
def test_operators(operator: str, source: str, expected: list[str]) -> None:
    assert sorted(becomes(source, operator)) == sorted(expected)


def test_image_axes_are_taken_for_each_other_where_both_are_known() -> None:
    source = "def f(sh, sw, rows, columns):\n    return g(sh), g(columns), g(w)\n"
    source += "def g(kh):\n    return kh\n"
    assert becomes(source, "stride") == []  # arguments are no names of the body
    source = "def f(p):\n    sh, sw = p\n    return sh\ndef g(sh):\n    return sh\n"
    assert becomes(source, "stride") == ["return sw"]


def test_a_step_is_left_out_only_where_the_rest_still_runs() -> None:
    source = "def f(a):\n    b = a\n    a = g(b)\n    if b:\n        h()\n    return a\n"
    assert becomes(source, "statement") == ["pass", "pass", "pass"]
    assert becomes(source, "condition") == ["if not (b):"]


@pytest.mark.parametrize(
    "source",
    [
        '"""Text with 1 + 2 in it."""',
        "from a import b",
        "assert a == 1",
        "raise ValueError(1)",
        "a: tuple[int, 3]",
        "def f(a: b[0] = c, *, d: e[1] = g) -> h[2]: ...",
        "@cache(size=3)\ndef f(): ...",
        "if TYPE_CHECKING:\n    a = 1",
        "a = f'{b[0]}'",
        "__all__ = [1]",
        "Arrays = tuple[Array, ...]",
        "a = HostKernel('a', 1, edges=(1, 7), in_place=True)",
        "a = kernel(ReLU, maximum, relu, batch_invariant=True), kernel(Add, maximum, add)",
        "a = RoundingContract(a, b, c, blocks=2)",
        "a = f(optimize=True)",
    ],
)
def test_what_is_never_touched(source: str) -> None:
    assert [m.after for m in mutants_of("a.py", source)] == []


def test_functions_in_a_declaration_are_mutated() -> None:
    changed = becomes("HostKernel(scratch=lambda p: p + 2)", "constant")
    assert changed == ["HostKernel(scratch=lambda p: p + 1)", "HostKernel(scratch=lambda p: p + 3)"]


def test_positions_count_characters_and_lines_are_whole() -> None:
    source = 'def f():\n    """√, γ: more bytes than characters."""\n'
    source += '    return "×", [\n        1,\n    ]\n'
    _, first = (m for m in mutants_of("a.py", source) if m.operator == "constant")
    assert (first.line, first.column, first.scope) == (4, 9, "f")
    assert (first.before, first.after) == ("1,", "2,")
    assert first.diff(source).splitlines() == [
        "--- a/a.py",
        "+++ b/a.py",
        "@@ -1,5 +1,5 @@",
        " def f():",
        '     """√, γ: more bytes than characters."""',
        '     return "×", [',
        "-        1,",
        "+        2,",
        "     ]",
    ]


def test_equal_changes_in_one_scope_are_told_apart() -> None:
    source = "def f():\n    g(1)\n    g(1)\n"
    ones = [m for m in mutants_of("a.py", source) if m.after == "g(2)"]
    assert [(m.line, m.occurrence) for m in ones] == [(2, 1), (3, 2)]
    assert len({m.id for m in ones}) == 2


# -- NumPy's mutants ---------------------------------------------------------------------------


def test_numpy_has_mutants_of_every_operator(numpy_plan: Plan) -> None:
    mutants = [m for m in numpy_plan.mutants if m.kind == "tokens"]
    assert len(mutants) - len(numpy_plan.reasons) >= 150
    assert {m.operator for m in mutants} == set(OPERATORS)
    assert {m.file for m in mutants} == {path.name for path in SOURCES.glob("*.py")}
    assert max(Counter(m.id for m in mutants).values()) == 1
    assert len({(m.file, m.source) for m in mutants}) == len(mutants)


def test_each_mutant_is_a_program_and_another_one(numpy_plan: Plan) -> None:
    for mutant in sample(numpy_plan.mutants, 60, seed=0):
        original = numpy_plan.texts[mutant.file]
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(original))
        diff = numpy_plan.diff(mutant)
        assert diff.count("\n@@") == 1
        assert mutant.before != mutant.after


def test_a_sample_is_the_same_for_a_seed_and_any_first_part_of_it_is_one_too(
    numpy_plan: Plan,
) -> None:
    mutants = numpy_plan.mutants
    chosen = sample(mutants, 60, seed=3)
    assert chosen == sample(mutants, 60, seed=3) == sample(list(reversed(mutants)), 60, seed=3)
    assert chosen != sample(mutants, 60, seed=4)
    assert sample(mutants, None, seed=3)[:60] == chosen
    assert sample(chosen[:1], 10, seed=3) == chosen[:1]
    everything = sample(mutants, None, seed=0)
    assert sorted(m.id for m in everything) == sorted(m.id for m in mutants)


@pytest.mark.parametrize("limit", [60, 150, 400])
def test_every_operator_has_its_share_of_a_sample(numpy_plan: Plan, limit: int) -> None:
    mutants = numpy_plan.mutants
    shares = Counter(m.operator for m in mutants)
    counts = Counter(m.operator for m in sample(mutants, limit, seed=5))
    for operator, count in shares.items():
        # A sample ends at one fraction of every deck. An operator has then at most one mutant more
        # or less than this fraction of its own, and the limit differs from it by one an operator.
        rounded = 1 + len(shares) * count / len(mutants)
        assert abs(counts[operator] - limit * count / len(mutants)) <= rounded


def test_a_place_in_the_order_says_nothing_about_a_mutant() -> None:
    """A mutant's place in the sample does not depend on its place in the source."""
    mutants = mutants_of("a.py", "\n".join(f"a{i} = {i + 1}" for i in range(200)))
    order = {m.id: place for place, m in enumerate(sample(mutants, None, seed=0))}
    early = [order[m.id] for m in mutants[: len(mutants) // 2]]
    assert abs(sum(early) / len(early) / len(mutants) - 0.5) < 0.05


def test_a_kernel_reaches_its_own_code_and_its_helpers(numpy_plan: Plan) -> None:
    reaches = {k.id: reach(k, SOURCES) for k in r18_numpy.Backend().kernels()}

    def shown(text: str, file: str, wanted: str = "fp32") -> set[str]:
        line = 1 + numpy_plan.texts[file][: numpy_plan.texts[file].index(text)].count("\n")
        names = [name for name in reaches if name.endswith(wanted)]
        return {name.split("/")[2] for name in reaching(file, line, reaches, names)}

    gap = {"mean", "parts"}  # alone, and with a classifier
    assert shown("np.mean(", "others.py") == gap
    assert shown("first = max(0", "taps.py") == {"separable", "direct"}  # through a helper
    assert shown("return workers * ceil_div", "others.py") == {"separable"}  # in a lambda
    assert shown("fitting = ", "blocks.py") == {"im2col"}
    assert shown("y += bias", "conv.py") == {"im2col", "direct"}
    assert shown("BLOCK_NBYTES =", "blocks.py") == {"im2col"}  # named by a helper
    everything = {name.split("/")[2] for name in reaches if name.endswith("fp32")}
    assert shown("precisions = (FP32", "__init__.py") == everything
    assert reaching("conv.py", 1, reaches, ["numpy/relu/maximum/fp32"]) == []


# -- judged by hand ----------------------------------------------------------------------------


def test_every_judged_mutant_exists_and_has_a_reason() -> None:
    """Every judged mutant exists, or `Plan.of` and `reasons_in` would raise, and has a reason."""
    names = json.loads((Path(equivalents.__file__).parent / equivalents.FILE).read_text("utf-8"))
    core = reasons_in(parts_of(Path(__file__).with_name("core.toml")))
    for name in names:
        for reason in (core if name == CORE else Plan.of(name).reasons).values():
            assert len(reason.split()) >= 5
            assert reason.endswith(".")


def test_judgements_outlive_edits_elsewhere_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def f(a):\n    return a + 1\n"
    mutant = next(m for m in mutants_of("a.py", source) if m.after == "return a - 1")
    key = mutant.key
    monkeypatch.setattr(equivalents, "listed", lambda backend: {key: "Because."})
    moved = mutants_of("a.py", "import os\n\n\n" + source)
    assert list(equivalents.judged("toy", moved).values()) == ["Because."]
    edited = mutants_of("a.py", source.replace("+ 1", "+ 2"))
    with pytest.raises(UsageError, match=r"lists 1 mutant\(s\) of 'toy' that no longer exist") as e:
        equivalents.judged("toy", edited)
    assert "a.py in f: return a + 1 → return a - 1" in str(e.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"reason": " "}, "has no reason"), ({"becomes": ["b", "b"]}, "is listed twice")],
)
def test_a_faulty_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    entry = {"file": "a.py", "scope": "f", "line": "a", "becomes": ["b"], "reason": "Because."}
    (tmp_path / equivalents.FILE).write_text(json.dumps({"toy": [entry | change]}), "utf-8")
    monkeypatch.setattr(equivalents, "files", lambda package: tmp_path)
    with pytest.raises(UsageError, match=message):
        equivalents.listed("toy")


# -- running -----------------------------------------------------------------------------------


def test_a_fixed_sample_of_numpys_mutants_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # with one, nothing is cut up for threads
    before = {path: path.read_bytes() for path in SOURCES.rglob("*.py")}
    seen: list[tuple[int, int]] = []
    found = run(
        "numpy",
        limit=18,
        seed=SAMPLE_SEED,
        kernels="numpy/[!c]*/*/fp32",  # convolutions take minutes; `r18 mutate` shows all
        network="tiny",
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert found.count("survived") == 0, found.text()
    assert found.count("killed") >= 12
    assert found.percent == 100
    assert seen[-1] == (18, 18)
    assert {path: path.read_bytes() for path in SOURCES.rglob("*.py")} == before
    for result in found.results:
        assert (result.finding is None) == (result.status == "equivalent")
        assert result.finding is None or result.finding.backend == "numpy"


@pytest.fixture(scope="module")
def toy() -> Score:
    """The toy's score: every mutant is caught except a constant that nothing uses."""
    return run(TOY, network=None, workers=1)


def test_a_mutant_that_changes_nothing_survives_and_is_shown(toy: Score) -> None:
    killed = {r.mutant.after: r.finding.check for r in toy.results if r.finding}
    assert killed["pass"] == "full_write"
    assert killed["np.maximum(inputs[0], 0)"] == "full_write"
    assert killed["np.fmax(inputs[0], 0, out=out)"] == "edges"
    assert killed["np.maximum(inputs[1], 0, out=out)"] == "runs"
    survivors = [r for r in toy.results if r.status == "survived"]
    assert [r.mutant.after for r in survivors] == ["HINT = 7", "HINT = 9"]
    assert toy.left == 0
    assert {r.kernels for r in toy.results} == {("toy/relu/maximum/fp32",)}
    text = toy.text()
    assert f"SURVIVED: {survivors[0].mutant.id}\n--- a/mutation_toy.py\n" in text
    assert "-HINT = 8\n+HINT = 7\n" in text
    assert text.endswith(toy.closing())
    count = len(killed)
    assert toy.closing() == (
        f"{TOY}: {count} of {count + 2} mutants caught (0 more are equivalent): "
        f"score {100 * count / (count + 2):.2f} %"
    )
    rows = [line.split() for line in text.splitlines()]
    assert ["constant", "3", "1", "2", "0"] in rows
    assert ["all", str(count + 2), str(count), "2", "0"] in rows
    assert ["full_write", str(list(killed.values()).count("full_write"))] in rows


def test_equivalent_mutants_are_not_run_and_do_not_count(
    toy: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ("mutation_toy.py", "", "HINT = 8", "HINT = 9", 1)
    monkeypatch.setattr(equivalents, "listed", lambda backend: {key: "Nothing uses it."})
    monkeypatch.setattr(running, "sample", lambda mutants, limit, seed: mutants[1:2])
    with pytest.raises(UsageError, match="nothing would be measured"):
        run(TOY, limit=1, network=None)
    judged = [
        replace(r, status="equivalent", reason="Nothing uses it.") if r.status == "survived" else r
        for r in toy.results
    ]
    found = replace(toy, results=tuple(judged))
    assert found.percent == 100
    assert found.text().count("\nreason: Nothing uses it.\n") == 2


# -- going on ----------------------------------------------------------------------------------


class Told:
    """A progress callback that collects the ids of judged mutants."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def __call__(self, done: int, total: int, what: str) -> None:
        if what != "the unchanged kernels":
            self.ids.append(what)


def recorded(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "mutate-cpu.json").read_text())["backends"][TOY]


@pytest.mark.usefixtures("quick_runs")
def test_the_same_command_goes_on_where_it_stopped(toy: Score, tmp_path: Path) -> None:
    first, second, third = Told(), Told(), Told()
    some = run(TOY, network=None, workers=1, limit=3, records_folder=tmp_path, progress=first)
    assert [r.mutant.id for r in some.results] == sorted(first.ids, key=place_of)
    everything = run(TOY, network=None, workers=1, records_folder=tmp_path, progress=second)
    assert sorted([*first.ids, *second.ids]) == sorted(r.mutant.id for r in toy.results)
    assert everything.closing() == toy.closing()
    assert [r.status for r in everything.results] == [r.status for r in toy.results]
    again = run(TOY, network=None, workers=1, records_folder=tmp_path, progress=third)
    assert third.ids == []
    assert again.text() == everything.text()
    written = recorded(tmp_path)
    assert (written["mutants"], written["left"], written["network"]) == (len(toy.results), 0, None)
    assert list(written["unchanged"]) == ["toy/relu/maximum/fp32"]


def place_of(name: str) -> tuple[int, int]:
    _, line, column, *_ = name.split(":")
    return int(line), int(column)


@pytest.mark.usefixtures("quick_runs")
def test_each_mutant_is_on_the_disk_when_it_is_judged(tmp_path: Path) -> None:
    """Each mutant is on disk when the next is reported; the reported one may not be yet."""
    held: list[int] = []

    def look(done: int, total: int, what: str) -> None:
        if (tmp_path / "mutate-cpu.json").exists():
            held.append(len(recorded(tmp_path)["results"]))

    run(TOY, network=None, workers=1, records_folder=tmp_path, progress=look)
    assert held == list(range(1, 1 + len(held)))
    assert len(recorded(tmp_path)["results"]) == len(held) + 1


@pytest.mark.usefixtures("quick_runs")
def test_what_has_changed_is_run_again_and_what_is_asked_for(tmp_path: Path) -> None:
    def rerun(**options: Any) -> list[str]:
        reported = Told()
        common = {"network": None, "workers": 1, "records_folder": tmp_path, "progress": reported}
        run(TOY, **(common | options))
        return reported.ids

    everything = rerun()
    survivors = [k for k, v in recorded(tmp_path)["results"].items() if v["status"] == "survived"]
    assert len(survivors) == 2
    assert sorted(rerun(again="survived")) == survivors
    assert sorted(rerun(again="all")) == sorted(everything)
    path = tmp_path / "mutate-cpu.json"
    data = json.loads(path.read_text())
    changed = min(data["backends"][TOY]["results"])
    data["backends"][TOY]["results"][changed]["digest"] = "of other sources"
    path.write_text(json.dumps(data))
    assert rerun() == [changed]
    assert len(rerun(seed=1)) == len(everything)  # on other inputs
    with pytest.raises(UnknownName, match="did you mean 'survived'"):
        rerun(again="survive")


@pytest.mark.usefixtures("quick_runs")
def test_fates_outlive_comments_and_move_with_their_lines(tmp_path: Path) -> None:
    reported = Told()
    common = {"network": None, "workers": 1, "records_folder": tmp_path}
    run(TOY, **common)
    path = tmp_path / "mutate-cpu.json"
    data = json.loads(path.read_text())
    results = data["backends"][TOY]["results"]

    def below(name: str) -> str:
        file, line, *others = name.split(":")
        return ":".join([file, str(int(line) + 7), *others])

    data["backends"][TOY]["results"] = {below(name): fate for name, fate in results.items()}
    path.write_text(json.dumps(data))
    run(TOY, **common, progress=reported)
    assert reported.ids == []
    assert recorded(tmp_path)["results"] == results


@pytest.mark.parametrize(
    ("suffix", "source", "same", "other"),
    [
        (
            ".py",
            'def f(a):\n    """Adds."""\n    return a + 1  # one\n',
            "def f(a):\n    # one more\n    return (a + 1)\n",
            "def f(a):\n    return a + 2\n",
        ),
        (
            ".cu",
            "int f(int a) { return a + 1; }  // one\n",
            "/* adds */\nint f(int a)  { return a + 1; }\n",
            "int f(int a) { return a + 2; }\n",
        ),
    ],
)
def test_comments_and_layout_are_no_code(suffix: str, source: str, same: str, other: str) -> None:
    code = LANGUAGES[suffix].code
    assert code(source) == code(same) != code(other)


def test_a_digest_depends_on_the_code_and_the_change(numpy_plan: Plan) -> None:
    kernel = next(iter(numpy_plan.reaches))
    first, second = numpy_plan.mutants[:2]
    digest = numpy_plan.digest([kernel], first)
    assert digest != numpy_plan.digest([kernel], second)
    assert numpy_plan.digest([kernel]) not in (digest, numpy_plan.digest([]))

    def edited(change: Callable[[str], str]) -> Plan:
        texts = dict(numpy_plan.texts)
        for file in texts:
            texts[file] = change(texts[file])
        return replace(numpy_plan, texts=texts, _codes={}, _digests={})

    assert edited(lambda text: f"# A comment.\n\n{text}").digest([kernel], first) == digest
    assert edited(lambda text: f"{text}\nMORE = 1\n").digest([kernel], first) != digest


@pytest.mark.usefixtures("quick_runs")
def test_what_was_judged_equivalent_meanwhile_is_not_what_the_record_says(
    toy: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(TOY, network=None, workers=1, records_folder=tmp_path)
    key = ("mutation_toy.py", "", "HINT = 8", "HINT = 9", 1)
    monkeypatch.setattr(equivalents, "listed", lambda backend: {key: "Nothing uses it."})
    found = run(TOY, network=None, workers=1, records_folder=tmp_path)
    assert (found.count("survived"), found.count("equivalent")) == (1, 1)
    (judged,) = recorded(tmp_path)["by_hand"].items()
    assert judged[0].startswith("mutation_toy.py:")
    assert judged[1] == "Nothing uses it."


@pytest.mark.usefixtures("quick_runs")
def test_time_that_is_up_leaves_mutants(toy: Score, tmp_path: Path) -> None:
    found = run(TOY, network=None, workers=1, minutes=0, records_folder=tmp_path)
    assert (found.results, found.left) == ((), len(toy.results))
    assert f"STOPPED early: {found.left} of {found.left} mutants" in found.closing()
    assert recorded(tmp_path)["left"] == found.left
    after = run(TOY, network=None, workers=1, minutes=60, records_folder=tmp_path)
    assert (after.closing(), after.left) == (toy.closing(), 0)


@pytest.mark.usefixtures("quick_runs")
def test_a_run_that_judges_nothing_leaves_the_scores_of_earlier_sources(
    toy: Score, tmp_path: Path
) -> None:
    file = toy.results[0].mutant.file
    run(TOY, network=None, workers=1, limit=2, records_folder=tmp_path)
    run(TOY, network=None, workers=1, files=file, limit=1, records_folder=tmp_path)
    path = tmp_path / "mutate-cpu.json"
    data = json.loads(path.read_text())
    mine = data["backends"][TOY]
    for fate in mine["results"].values():
        fate["digest"] = "of earlier sources"
    records.write(path, data)
    for files in ("*", file):
        found = run(TOY, network=None, workers=1, files=files, minutes=0, records_folder=tmp_path)
        assert found.left
        after = recorded(tmp_path)
        for kept in ("date", "files", "limit", "score", "samples", "results"):
            assert after[kept] == mine[kept], kept


def test_the_score_is_of_a_first_part_of_the_sample(toy: Score, numpy_plan: Plan) -> None:
    """The score is of the sample's first part; of what finished first it would be too high, since
    survivors take longest."""
    plan = replace(numpy_plan, mutants=tuple(r.mutant for r in toy.results), reasons={})
    order = list(toy.results)
    backend = load_backend("numpy")
    chosen = [result.mutant for result in order]
    sample = running._Sample(plan, backend, backend.probe(), [], {}, chosen, {})
    state = running._State(sample, running.Known(), TOY, toy.profile, toy.seed, None, {})
    state.fates = {r.mutant.id: r for r in order if r is not order[3]}
    found = state.score()
    assert found.results == tuple(order[:3])
    assert found.further == tuple(order[4:])
    assert found.left == 1
    assert found.percent == replace(toy, results=found.results).percent
    state.fates[order[3].mutant.id] = order[3]
    assert state.score() == toy


@pytest.mark.usefixtures("quick_runs")
def test_records_of_other_backends_stay(tmp_path: Path) -> None:
    path = tmp_path / "mutate-cpu.json"
    run(TOY, network=None, workers=1, limit=1, records_folder=tmp_path)
    data = json.loads(path.read_text())
    other = data["backends"].pop(TOY) | {"score": 98.0}
    records.write(path, data | {"backends": {"other": other}})
    run(TOY, network=None, workers=1, limit=1, records_folder=tmp_path)
    assert set(json.loads(path.read_text())["backends"]) == {"other", TOY}
    assert json.loads(path.read_text())["backends"]["other"] == other


@pytest.mark.usefixtures("quick_runs")
def test_a_run_of_other_files_has_a_score_of_its_own(
    toy: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = (f"2026-01-{day:02}T00:00:00+00:00" for day in range(1, 32))
    monkeypatch.setattr(records, "now", lambda: next(days))
    path = tmp_path / "mutate-cpu.json"

    def recorded() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text())["backends"][TOY]
        return found

    run(TOY, network=None, workers=1, limit=2, records_folder=tmp_path)
    head = recorded()
    assert "samples" not in head
    file = toy.results[0].mutant.file
    run(TOY, network=None, workers=1, files=file, limit=1, records_folder=tmp_path)
    both = recorded()
    kept = ("date", "files", "limit", "mutants", "killed", "survived", "score")
    assert {name: both[name] for name in kept} == {name: head[name] for name in kept}
    assert list(both["samples"]) == [file]
    assert (both["samples"][file]["limit"], both["samples"][file]["mutants"]) == (1, 1)
    assert set(both["results"]) >= set(head["results"])
    data = json.loads(path.read_text())
    fates = data["backends"][TOY]["results"]
    fates["other.py:1:1:index:0:abcdef"] = fates[next(iter(fates))] | {"digest": "old"}
    records.write(path, data)
    run(TOY, network=None, workers=1, files=file, limit=1, records_folder=tmp_path)
    assert "other.py:1:1:index:0:abcdef" in recorded()["results"], "it is of the score that is kept"
    run(TOY, network=None, workers=1, limit=1, records_folder=tmp_path)
    assert "other.py:1:1:index:0:abcdef" not in recorded()["results"]
    assert recorded()["limit"] == 1, "the same files as first"
    again, before = recorded()["samples"][file], both["samples"][file]
    assert again["date"] > before["date"], "the sample was taken again"
    assert again | {"date": ""} == before | {"date": ""}


def test_kernels_of_each_algorithm_come_first_and_cheap_ones_before_others() -> None:
    took = {"b/conv/im2col/1": 3, "b/conv/im2col/2": 2, "b/conv/direct/1": 9, "b/add/x/1": 1}
    paces = {kernel: Pace(seconds, seconds / 4) for kernel, seconds in took.items()}
    assert eager(took, paces) == [
        "b/add/x/1",
        "b/conv/im2col/2",
        "b/conv/direct/1",
        "b/conv/im2col/1",
    ]
    assert eager(["b/conv/im2col/2", "b/add/x/1", "b/conv/im2col/1"], {}) == [
        "b/add/x/1",
        "b/conv/im2col/2",
        "b/conv/im2col/1",
    ]


def test_a_mutant_may_be_silent_for_far_longer_than_what_it_was_made_from() -> None:
    paces = {"a": Pace(30.0, 2.0), "b": Pace(90.0, 5.0)}
    assert patience(["a"], paces, 60) == 18
    assert patience(["a", "b"], paces, 60) == 30
    assert patience(["a", "b"], paces, 20) == 20
    assert patience(["c"], paces, 60) == 60


@pytest.mark.usefixtures("quick_runs")
def test_the_silence_of_an_unchanged_kernel_holds_its_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paces are measured before programs, which compile all kernels into a shared cache."""
    order: list[str] = []
    for name in ("_baseline", "_unchanged_programs"):
        real = getattr(running, name)

        def noted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            order.append(name)
            return real(*arguments)

        monkeypatch.setattr(running, name, noted)
    run(TOY, network="tiny", workers=1, limit=1)
    assert order == ["_baseline", "_unchanged_programs"]


# -- the command -------------------------------------------------------------------------------


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(mutate)
    return CliRunner().invoke(app, arguments)


def test_command_line(toy: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(running, "run", lambda name, **options: (asked.append(options), toy)[1])
    result = invoke("--backend", TOY, "--json", "--limit", "3", "--network", "none")
    assert result.exit_code == FOUND, result.exception
    assert (asked[0]["limit"], asked[0]["network"]) == (3, None)
    assert (asked[0]["minutes"], asked[0]["records_folder"]) == (None, None)
    data = json.loads(result.stdout)
    assert data["mutants"] == len(data["results"]) == data["killed"] + data["survived"]
    one = next(r for r in data["results"] if r["after"].startswith("np.fmax"))
    assert one["status"] == "killed"
    assert one["finding"]["check"] == "edges"
    assert one["problem"].startswith("relu() ")
    result = invoke("--backend", TOY, "--require", "50")
    assert result.exit_code == 0, result.exception
    assert result.stdout.rstrip().endswith(toy.closing())
    left = replace(toy, results=toy.results[:1], further=toy.results[2:], left=1)
    monkeypatch.setattr(running, "run", lambda name, **options: left)
    result = invoke("--backend", TOY, "--minutes", "1")
    assert result.exit_code == FOUND  # whatever the score
    assert "STOPPED early: 1 of" in result.stdout
    result = invoke("--backend", TOY, "--again", "all")
    assert isinstance(result.exception, UsageError)
    assert "needs --record" in str(result.exception)


def test_looking_runs_nothing() -> None:
    result = invoke("--backend", TOY, "--list")
    lines = result.stdout.splitlines()
    assert lines[2].startswith("mutation_toy.py:15:8:constant:0:")
    assert lines[-1].endswith(" mutants, 0 of them equivalent")
    name = lines[2].split()[0]
    shown = invoke("--backend", TOY, "--show", name).stdout
    assert "+HINT = 7" in shown
    entry = json.loads(shown[shown.index("\n{") :])
    assert (entry.pop("reason"), entry.pop("becomes")) == ("", ["HINT = 7"])
    assert entry == {"file": "mutation_toy.py", "scope": "", "line": "HINT = 8"}
    missing = invoke("--backend", TOY, "--show", "mutation_toy.py:1:1:constant:0:abcdef")
    assert isinstance(missing.exception, UnknownName)


def test_what_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R18_BACKEND", raising=False)
    assert isinstance(invoke().exception, UsageError)
    with pytest.raises(BackendUnavailable):
        Target.of("no_such_module:Backend")
    with pytest.raises(UnknownName, match="unknown kernel 'toy/conv"):
        run(TOY, kernels="toy/conv2d/*", network=None)
    with pytest.raises(R18Error, match="the unchanged kernels must pass") as e:
        run("mutation_toy:Wrong", network=None, workers=1)
    assert "toy/relu/maximum/fp32: full_write: " in str(e.value)
    assert "in a copy of mutation_toy.py alone, without other files of its folder" in str(e.value)


def tried(pool: Pool, root: Path, mutant: Mutant, **limits: Any) -> Any:
    """The result of a trial of one of the toy's mutants."""
    question = Question(Target.of(TOY), root, profile("quick"), seed=0, network=None, **limits)
    arguments = {
        "question": question,
        "mutant": mutant,
        "kernels": ["toy/relu/maximum/fp32"],
        "silence_seconds": 3,
    }
    (outcome,) = pool.run([Job(trial, arguments, TOY, "")])
    return outcome.result


def test_a_message_names_files_as_the_package_does(tmp_path: Path) -> None:
    root = tmp_path / "r18-mutate-ab12_"
    said = f'{root}/tmp1_2/pkg/k.cu(3): see "../..{root}/unchanged/pkg/k.cuh"'
    found = tidied(Ended("invalid", f"\x1b[1m{said}\x1b[0m"), root)
    assert found == Ended("invalid", 'pkg/k.cu(3): see "pkg/k.cuh"')
    assert tidied(None, root) is None


def test_a_trial_that_is_late_has_found_nothing(tmp_path: Path, pool: Pool) -> None:
    """A trial that runs out of time finds nothing, even if the mutant hangs."""
    (source,) = Target.of(TOY).sources().values()
    mutated = source.replace("np.maximum(inputs[0], 0, out=out)", "while True: pass", 1)
    right, *_ = mutants_of("mutation_toy.py", source)
    assert tried(pool, tmp_path, right) is None  # it survives, and the worker is warm
    mutant = replace(right, source=mutated)
    for seconds, message in ((1.5, "its time was up"), (0, "there was no time for it")):
        found = tried(pool, tmp_path, mutant, deadline=time.monotonic() + seconds)
        assert (found.check, found.message) == (LATE, message)


@pytest.mark.parametrize(
    ("body", "check", "message"),
    [
        ("while True: pass", "hang", "a call had not ended after 3 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crash", "died of SIGSEGV"),
        ("import os; os._exit(0)", "crash", "exited with code 0"),
        ("raise MemoryError('all')", "runs", "raised MemoryError in relu (mutation_toy.py:"),
        ("pass\nno_such_name", "import", "NameError: name 'no_such_name' is not defined"),
        (
            "pass\nBackend.kernels = lambda self: ()",
            "kernels",
            "the backend no longer lists toy/relu",
        ),
        (
            "pass\nBackend.probe = lambda self: setattr(self, 'kernels', tuple)",
            "kernels",
            "the backend no longer lists toy/relu",
        ),
        ("pass\nBackend.kernels = None", "error", "TypeError: 'NoneType' object is not callable"),
    ],
)
def test_each_way_to_fail_is_a_kill(
    tmp_path: Path, pool: Pool, body: str, check: str, message: str
) -> None:
    target = Target.of(TOY)
    (source,) = target.sources().values()
    body, _, rest = body.partition("\n")
    mutated = source.replace("np.maximum(inputs[0], 0, out=out)", body, 1) + rest
    found = tried(pool, tmp_path, replace(mutants_of("mutation_toy.py", source)[0], source=mutated))
    assert isinstance(found, Finding)
    assert found.check == check
    assert message in found.message
    assert (found.problem is None) == (check in ("import", "kernels", "error"))
    assert list(tmp_path.iterdir()) == []
