"""Mutants of CUDA C++: the operators, code that is left alone, and which mutants count."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import cuda_toy
from mutation_tasks import Told, asked_thrice, one_after_another
from r18.backend.host import HostKernel
from r18.errors import R18Error
from r18_cupy.catalogue import all_kernels
from r18_cupy.cuda import compiler
from r18_cupy.cuda.compiler import CompileError, Entry, compile_entry
from r18_oracle.findings import Finding
from r18_oracle.mutation import run as running
from r18_oracle.mutation.edits.cuda import OPERATORS
from r18_oracle.mutation.edits.cuda_tokens import Source, words
from r18_oracle.mutation.mutants import Mutant, Target, mutants_of, sample
from r18_oracle.mutation.plan import Plan
from r18_oracle.mutation.process import Ended
from r18_oracle.mutation.run import run
from r18_oracle.mutation.sanitizing import Heard
from r18_oracle.mutation.trial import INVALID, PTXCHECK, Passed, Question
from r18_oracle.sanitize.run import Request
from r18_oracle.search.profiles import profile
from r18_oracle.search.worker import Job, Pool

KERNELS = compiler.KERNELS
TOY = "cuda_toy:Backend"
KERNEL = "toy/relu/maximum/fp32"


def body(*lines: str) -> str:
    return "__global__ void f(int n, const float* a) {\n" + "\n".join(lines) + "\n}\n"


def becomes(operator: str, *lines: str) -> list[str]:
    """The changes of a function's lines by one operator."""
    return [m.after for m in mutants_of("a.cu", body(*lines)) if m.operator == operator]


# -- tokens ------------------------------------------------------------------------------------


def test_comments_text_and_directives_are_no_code() -> None:
    text = '#include "a.cuh"\nint x = 1; // 2\n/* 3 */ auto y = "4"; \n#if A > 5\n#endif\n'
    assert [t.text for t in Source(text).tokens if t.kind == "number"] == ["1"]
    assert words("a  +\tb // c") == words("a + /* c */ b") == ("a", "+", "b")
    assert words("a + b") != words("a - b")


def test_what_a_define_defines_is_code() -> None:
    tokens = Source("#define WARPS 4\n#define F(x) \\\n  ((x) + 1)\n").tokens
    assert [t.text for t in tokens] == ["4", "(", "(", "x", ")", "+", "1", ")"]
    assert [m.after for m in mutants_of("a.cu", "#define WARPS 4\n")] == [
        "#define WARPS 3",
        "#define WARPS 5",
    ]
    continued = mutants_of("a.cu", "#define F(x) \\\n  ((x) + 1)\n")
    assert "((x) - 1)" in [m.after for m in continued]


def test_every_token_knows_its_function() -> None:
    text = (
        "struct S { int a; };\nint f(int b) { if (b) { b = 1; } return b; }\nint g() { return 2; }"
    )
    source = Source(text)
    scopes = {t.text: scope for t, scope in zip(source.tokens, source.scopes, strict=True)}
    assert (scopes["1"], scopes["2"], scopes["a"]) == ("f", "g", "")
    assert all(source.text[t.start : t.end] == t.text for t in source.tokens)


# -- the operators -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "line", "expected"),
    [
        ("index", "y = a[i];", ["y = a[(i) + 1];", "y = a[(i) - 1];"]),
        ("index", "y = a[0];", ["y = a[(0) + 1];"]),
        ("bound", "if (i < n) g();", ["if (i <= n) g();"]),
        ("bound", "y = a >= b;", ["y = a > b;"]),
        ("bound", "g<float>(a);", []),
        ("stride", "y = p.sh + p.w;", ["y = p.sw + p.w;", "y = p.sh + p.h;"]),
        ("constant", "int i = 0;", ["int i = 1;"]),
        ("constant", "i = 32u;", ["i = 33u;", "i = 31u;"]),
        ("constant", "y = 0.0f;", ["y = 1.0f;"]),
        ("constant", "y = 0.5f;", ["y = (2 * 0.5f);"]),
        ("constant", "y = 0xffffffff;", []),
        ("arithmetic", "y = a * b + c;", ["y = a + b + c;", "y = a * b - c;", "y = a * b;"]),
        ("arithmetic", "const float* y = x;", []),
        ("arithmetic", "y = -x;", []),
        ("arithmetic", "y = a / 2;", ["y = a * 2;", "y = a;"]),
        ("accumulator", "y += a;", ["y = a;", "y -= a;"]),
        ("accumulator", "y = fmaf(a, b, y);", ["y = fmaf(a, b, 0.0f);"]),
        ("synchronisation", "__syncthreads();", [";"]),
        ("statement", "__syncthreads();", []),
        ("statement", "y = a;", [";"]),
        ("statement", "a[i].b = c;", [";"]),
        ("statement", "load<4>(a, b);", [";"]),
        ("statement", "int y = a;", []),
        ("statement", "if (i >= n) return;", [";"]),
        ("statement", "if (bias) y += bias[c];", ["if (bias) ;"]),
        ("statement", "for (int i = 0; i < n; ++i) {", []),
        ("comparison", "if (a == b) g();", ["if (a != b) g();"]),
        ("condition", "if (a) g();", ["if (!(a)) g();"]),
        ("condition", "y = a && b;", ["y = a || b;"]),
        ("condition", "y = a ? b : c;", ["y = a || true ? b : c;", "y = a && false ? b : c;"]),
        ("argument", "g(a, b + 1, c);", ["g(b + 1, a, c);", "g(a, c, b + 1);"]),
        ("argument", "y = fmaxf(a, b);", []),
        ("function", "y = fmaxf(a, b);", ["y = fminf(a, b);"]),
    ],
)
def test_operators(operator: str, line: str, expected: list[str]) -> None:
    closing = ["}"] if line.endswith("{") else []
    assert sorted(becomes(operator, line, *closing)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        body("// a[i] = b + 1;"),
        body('static_assert(A % 4 == 0, "A + 1");'),
        body('asm volatile("cp.async.wait_group 1;");'),
        "template <int N = 4>\nstruct S { int a[4]; };\n",
        'extern "C" __global__ void __launch_bounds__(256) f(int n);\n',
        "#if WARPS > 4\n#endif\n",
    ],
)
def test_what_is_never_touched(source: str) -> None:
    assert [m.after for m in mutants_of("a.cu", source)] == []


def test_constants_outside_of_functions_are_mutated() -> None:
    found = [m.after for m in mutants_of("a.cu", "constexpr int WARPS = 4;\nint other = 4;\n")]
    assert found == ["constexpr int WARPS = 3;", "constexpr int WARPS = 5;"]


# -- the real kernels --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.of("cupy")


def test_the_kernels_have_mutants_of_every_operator(plan: Plan) -> None:
    mutants = [m for m in plan.mutants if m.compiled and m.kind == "tokens"]
    assert len(mutants) >= 200
    assert {m.operator for m in mutants} == set(OPERATORS)
    assert max(Counter(m.id for m in mutants).values()) == 1
    assert len({(m.file, m.source) for m in mutants}) == len(mutants)
    chosen = sample(mutants, 250, seed=0)
    assert len(chosen) == 250
    shares = Counter(m.operator for m in mutants)
    common = {name for name, count in shares.items() if 250 * count >= len(mutants)}
    assert common <= {m.operator for m in chosen}
    assert len(common) >= 10


def test_device_code_of_no_kernel_has_no_mutants(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device code of no kernel, such as the oracle's copy, has no mutants. If a kernel does not
    name its sources, all code may be its own."""
    assert "kernels/common/copy_late.cu" in plan.target.sources()
    files = {mutant.file for mutant in plan.mutants}
    assert "kernels/ops/gap.cu" in files
    assert "kernels/common/copy_late.cu" not in files
    assert "relu.cu" in {mutant.file for mutant in Plan.of(TOY).mutants}
    monkeypatch.setattr(cuda_toy, "Compiled", HostKernel)
    assert "relu.cu" in {mutant.file for mutant in Plan.of(TOY).mutants}


def test_a_mutant_is_shown_to_the_kernels_that_are_compiled_from_its_file(plan: Plan) -> None:
    for kernel in all_kernels():
        ours = {path.relative_to(KERNELS.parent).as_posix() for path in kernel.source_files}
        reached = {file for file, _, _ in plan.reaches[kernel.id] if file.startswith("kernels/")}
        assert reached == ours
        assert f"kernels/{kernel.entries()[0].source}.cu" in ours


def test_most_mutants_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most mutants compile, from a copy of the kernels as in a mutation run."""
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    original = (folder / "conv/direct.cu").read_text()
    entry = Entry("conv/direct", "conv2d_direct", (("STORAGE", "float"),))
    monkeypatch.setenv("R18_CACHE", str(tmp_path / "cache"))
    before = compile_entry(entry, "sm_90").cubin
    monkeypatch.setattr(compiler, "KERNELS", folder)
    chosen = sample(mutants_of("kernels/conv/direct.cu", original), 16, seed=0)
    fates: Counter[str] = Counter()
    for mutant in chosen:
        (folder / "conv/direct.cu").write_text(mutant.source)
        try:
            same = compile_entry(entry, "sm_90").cubin == before
            fates["same" if same else "changed"] += 1
        except CompileError:
            fates["invalid"] += 1
    assert fates["changed"] >= 12, fates


def test_comments_and_layout_do_not_change_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments and layout do not change machine code, so equal machine code shows equivalence."""
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder)
    path = folder / "conv/direct.cu"
    path.write_text("// A remark.\n\n" + path.read_text().replace("++c)", "c += 1)"))
    monkeypatch.setenv("R18_CACHE", str(tmp_path / "cache"))
    entry = Entry("conv/direct", "conv2d_direct", (("STORAGE", "float"),))
    before = compile_entry(entry, "sm_90").cubin
    monkeypatch.setattr(compiler, "KERNELS", folder)
    assert compile_entry(entry, "sm_90").cubin == before


# -- a run -------------------------------------------------------------------------------------


def test_a_run_tells_invalid_and_equivalent_mutants_from_survivors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "sanitizer", lambda: None)
    done: list[int] = []
    score = run(
        "cuda_toy:Backend",
        files="*.cu",
        network=None,
        workers=2,
        progress=lambda count, total, what: done.append(count),
    )
    fates = {result.mutant.after: result for result in score.results}
    assert {m.file for m in (result.mutant for result in score.results)} == {"relu.cu"}

    def status(line: str) -> str:
        return fates[line].status

    assert status("out[i] = fminf(x[i], 0.0f) + 0.0f;") == "killed"
    assert status("out[i] = fmaxf(x[(i) - 1], 0.0f) + 0.0f;") == "killed"
    assert status("out[i] = fmaxf(x[i], 1.0f) + 0.0f;") == "killed"
    assert status("out[i] = fmaxf(x[i], 0.0f) + 1.0f;") == "killed"
    assert status(";") == "killed"  # the last of them: nothing is written
    assert status("if (i > n) return;") == "equivalent"  # to this compiler
    assert status("out[i] = fmaxf(x[i], 0.0f) - 0.0f;") == "survived"
    assert status("const int i = threadIdx.y;") == "invalid"
    assert "blocks have one dimension" in fates["const int i = threadIdx.y;"].reason
    counts = Counter(result.status for result in score.results)
    assert score.tried == counts["killed"] + counts["survived"]
    assert score.percent == 100 * counts["killed"] / score.tried
    assert f"{counts['invalid']} do not compile" in score.closing()
    data = score.to_json()
    assert (data["invalid"], data["equivalent"]) == (counts["invalid"], counts["equivalent"])
    assert "SURVIVED: relu.cu" in score.text()
    assert done[-1] == len(score.results)


def test_a_survivor_that_breaks_a_rule_of_ordering_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A survivor without the wait, whose values all stay right, is caught by the ordering rules."""
    monkeypatch.setattr(running, "sanitizer", lambda: None)
    score = run(TOY, files="*.cu", network=None, workers=2)
    (unordered,) = [one for one in score.results if one.mutant.before == cuda_toy.WAIT]
    assert unordered.status == "killed"
    assert unordered.finding is not None
    assert unordered.finding.check == PTXCHECK
    assert "launch-wait: relu, PTX line" in unordered.finding.message


def test_unchanged_kernels_must_keep_the_rules_of_ordering() -> None:
    with pytest.raises(R18Error, match="ptxcheck: launch-wait: relu, PTX line"):
        run("cuda_toy:Unordered", files="*.cu", network=None, workers=1)


def test_survivors_are_shown_to_the_sanitizer_and_what_it_finds_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, tuple[str, ...]]] = []
    race = Finding("racecheck", TOY, KERNEL, None, "none", 0, "Race reported")
    survivor = "out[i] = fmaxf(x[i], 0.0f) - 0.0f;"
    said = [Heard(), Heard(race)]

    def heard(
        program: Path, target: Target, mutant: Mutant, request: Request, *rest: object
    ) -> Heard:
        shown.append((mutant.after, request.kernels))
        return said.pop(0) if mutant.after == survivor else Heard(clean=True)

    monkeypatch.setattr(running, "sanitizer", lambda: Path("compute-sanitizer"))
    monkeypatch.setattr(running, "version_of", lambda program: "compute-sanitizer 1")
    monkeypatch.setattr(running, "heard", heard)

    def fates() -> dict[str, tuple[str, str]]:
        score = run(TOY, files="*.cu", network=None, workers=2, records_folder=tmp_path)
        return {result.mutant.after: (result.status, result.sanitizer) for result in score.results}

    first = fates()
    assert (survivor, (KERNEL,)) in shown
    assert first[survivor] == ("survived", "")  # there was no time
    others = {after for after, (status, _) in first.items() if status == "survived"} - {survivor}
    assert {after for after, _ in shown} == {survivor, *others}
    assert {first[after][1] for after in others} == ({"compute-sanitizer 1"} if others else set())
    shown.clear()
    second = fates()  # the trials' results are from the record
    assert shown == [(survivor, (KERNEL,))]
    assert second == first | {survivor: ("killed", "")}
    shown.clear()
    assert fates() == second
    assert shown == []


# -- processes that are kept -------------------------------------------------------------------


def toy_mutants(*values: str) -> list[Mutant]:
    """Mutants of the toy that write these expressions."""
    source = Target.of(TOY).sources()["relu.cu"]
    some = mutants_of("relu.cu", source)[0]
    before = "fmaxf(x[i], 0.0f) + 0.0f;"
    assert before in source
    return [replace(some, source=source.replace(before, f"{value};")) for value in values]


def tried(root: Path, mutants: Sequence[Mutant | None]) -> list[Told]:
    """The results of one worker that tries the mutants in turn."""
    codes = {KERNEL: "of the original"}
    question = Question(
        Target.of(TOY), root, profile("quick"), 0, None, architecture="sm_90", codes=codes
    )
    arguments = {"question": question, "mutants": mutants, "kernels": [KERNEL]}
    with Pool(1) as pool:
        (outcome,) = pool.run([Job(one_after_another, arguments, TOY, "")])
    assert isinstance(outcome.result, list), outcome
    return outcome.result


def test_one_process_goes_from_mutant_to_mutant_as_long_as_values_are_all_that_is_wrong(
    tmp_path: Path,
) -> None:
    mutants = toy_mutants("fminf(x[i], 0.0f)", "fmaxf(x[i], 0.0f) - 0.0f", "x[i]", "y[i]", "x[i]")
    right, wrong, same, also_wrong, raises, after = tried(tmp_path, [None, *mutants])
    assert isinstance(right.found, Passed)
    assert isinstance(wrong.found, Finding)
    assert wrong.found.check == "exact"
    assert same.found is None
    assert isinstance(also_wrong.found, Finding)
    assert len({right.kept, wrong.kept, same.kept, also_wrong.kept}) == 1
    assert isinstance(raises.found, Finding)
    assert (raises.found.check, raises.kept) == ("runs", None)
    assert after.kept not in (None, right.kept)
    assert after.found == also_wrong.found


def test_what_a_used_process_raises_is_looked_at_in_a_new_one(tmp_path: Path) -> None:
    """A mutant that raises in a used process, which an earlier one spoiled, runs in a new one."""
    spoils, falls = toy_mutants(
        "x[i] + 0 * __import__('builtins').__dict__.setdefault('spoiled', 1)",
        "fmaxf(x[i], 0.0f) + 0 / (0 if 'spoiled' in __import__('builtins').__dict__ else 1)",
    )
    first, second, again = tried(tmp_path, [spoils, falls, falls])
    assert isinstance(first.found, Finding)
    assert first.found.check == "exact"
    assert second.found is None
    assert second.kept not in (None, first.kept)
    assert again == second


def test_a_process_is_asked_until_it_dies() -> None:
    with Pool(1) as pool:
        (outcome,) = pool.run([Job(asked_thrice, {}, TOY, "")])
    assert outcome.result == [
        ["to a", True],
        ["to b", True],
        ["to die", Ended("crash", "exited with code 0")],
    ]


def test_what_is_no_program_leaves_a_process_as_it_was(tmp_path: Path) -> None:
    no_program, wrong = toy_mutants("threadIdx.y", "x[i]")
    invalid, after = tried(tmp_path, [no_program, wrong])
    assert isinstance(invalid.found, Finding)
    assert (invalid.found.check, invalid.kept) == (INVALID, after.kept)
