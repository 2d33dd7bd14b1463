"""The command line as a user meets it: arguments, stdout, stderr and an exit code.

Most tests call `main` here, some run in a process of their own, as the console script does. What a
subcommand computes is tested with the library function that it calls.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import commands
import r18
from r18.backend import Kernel
from r18.backend.device import DeviceInfo
from r18.backend.registry import Listing, installed
from r18.backend.tuned import read_table
from r18.bench.tuning import shipped_table
from r18.cli import options
from r18.cli.app import COMMANDS, GROUP, main
from r18.cli.options import kernel_overrides, listed
from r18.cli.schedule import rows as schedule_rows
from r18.cpu import cpu, model_slug
from r18.errors import UsageError
from r18.graph.passes import fuse, fuse_pool
from r18.graph.resnet import resnet18, tiny
from r18.runtime.listing import Entry
from r18.weights import load_weights
from r18_numpy import Backend as NumpyBackend
from support import ROOT, run_python


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class Command:
    """Runs `r18 ARGS` in this process, without `R18_BACKEND` unless `env` sets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *args: object, **env: str) -> Done:
        self._capsys.readouterr()
        with self._monkeypatch.context() as patch:
            patch.delenv("R18_BACKEND", raising=False)
            for name, value in env.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["r18", *map(str, args)])
            with pytest.raises(SystemExit) as ended:
                main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, *self._capsys.readouterr())

    def output(self, *args: object, **env: str) -> str:
        """The stdout of a command that succeeds."""
        done = self(*args, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, *args: object, **env: str) -> str:
        """The message of a refused request: exit code 2, and nothing on stdout."""
        done = self(*args, **env)
        assert (done.returncode, done.stdout) == (2, ""), done
        return done.stderr


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def process(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `r18 ARGS` in a process of its own: the function behind the console script."""
    argv = ["r18", *map(str, args)]
    return run_python(f"import sys; sys.argv = {argv!r}; from r18.cli import main; main()", env=env)


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("photos") / "gradient.png"
    gradient = Image.linear_gradient("L")
    Image.merge("RGB", (gradient, gradient.rotate(90), gradient.rotate(180))).save(path)
    return path


# -- the application ---------------------------------------------------------------------------


def test_help_lists_every_command_and_the_exit_codes(command: Command) -> None:
    text = command.output("--help")
    listed_commands = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line]
    brought = sorted(entry.name for entry in entry_points(group=GROUP))
    assert listed_commands == [*COMMANDS, *brought]
    assert "verify" in brought
    assert "Exit codes: 0 success, 1 a difference" in " ".join(text.split())


@pytest.mark.parametrize("name", ["backends", "schedule", "plan", "classify", "bench"])
def test_every_command_has_help(command: Command, name: str) -> None:
    text = command.output(name, "--help")
    assert f"r18 {name} [OPTIONS]" in text
    assert "--json" in text


def test_version(command: Command) -> None:
    assert command.output("--version") == f"r18 {r18.__version__}\n"


def test_starting_loads_no_framework() -> None:
    code = "import sys, r18.cli; print({'torch', 'numba', 'cupy'} & set(sys.modules))"
    assert run_python(code).stdout == "set()\n"


def test_a_command_loads_no_other() -> None:
    """A command of the core or another package imports no other, whatever options precede it."""
    code = """
import sys
from r18.cli.app import application
for words in (["plan", "--help"], ["--version", "plan"], ["diff"], ["nobody"], []):
    for name in [name for name in sys.modules if name.startswith(("r18.cli.", "r18_oracle."))]:
        if name not in ("r18.cli.app", "r18.cli.options"):
            del sys.modules[name]
    application(words)
    places = {"r18.cli": ("plan", "bench", "evaluate"), "r18_oracle.cli": ("diff", "verify")}
    print(*(n for place, names in places.items() for n in names if f"{place}.{n}" in sys.modules))
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    every = "plan bench evaluate diff verify"
    assert done.stdout.splitlines() == ["plan", "plan", "diff", every, every]


@pytest.mark.parametrize("backend", ["numpy", "numba-cpu"])
def test_classifying_loads_no_pytorch(backend: str, photo: Path, tmp_path: Path) -> None:
    """Classifying does not import PyTorch, which takes longer than all the rest."""
    torch = pytest.importorskip("torch")
    network = resnet18()
    loaded, weights = load_weights("synthetic", network), tmp_path / "w.pth"
    torch.save({name: torch.tensor(array) for name, array in loaded.items()}, weights)
    code = f"""
import sys
sys.argv = ["r18", "classify", {str(photo)!r}, "--weights", {str(weights)!r}, "--timings"]
from r18.cli.app import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = run_python(code, env={"R18_BACKEND": backend})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    lines = done.stderr.split("seconds\n")[1].splitlines()[1:]
    assert [line.rpartition(" ")[0].strip() for line in lines] == [
        "start of Python, imports",
        "backend found and probed",
        "weights read and checked",
        "plan",
        "kernels compiled ahead",
        "weights folded and packed",
        "waiting for images",
        "first run, with kernels loaded or compiled",
        "other",
        "total",
    ]
    seconds = [float(line.split()[-1]) for line in lines]
    assert abs(sum(seconds[:-1]) - seconds[-1]) < 0.01


def test_an_unknown_option_exits_2(command: Command) -> None:
    done = command("schedule", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr


# -- backends ----------------------------------------------------------------------------------


def test_backends_marks_the_one_that_auto_takes(command: Command) -> None:
    lines = command.output("backends").splitlines()
    assert lines[0].split() == ["backend", "device", "provider", "precisions"]
    starred = [line for line in lines[2:] if line.split()[1:2] == ["*"]]
    assert len(starred) == 1
    numpy_line = next(line for line in lines if line.startswith("numpy"))
    assert numpy_line.rstrip().endswith("fp64 fp32 fp8 int8")
    assert f"r18 {r18.__version__}" in numpy_line


def test_backends_as_json(command: Command) -> None:
    found = {line["name"]: line for line in json.loads(command.output("backends", "--json"))}
    assert found["numpy"]["available"]
    assert found["numpy"]["device"]["kind"] == "cpu"
    assert found["numpy"]["precisions"] == ["fp64", "fp32", "fp8", "int8"]
    assert sum(line["auto"] for line in found.values()) == 1


def test_backends_shows_causes_and_remedies_below_the_table(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[r18.backends]\nbroken = broken_plugin:Backend\nlost = lost_plugin:Backend\n"
        "gone = gone_plugin:Backend\n"
    )
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('the wrong moon')\n")
    (tmp_path / "gone_plugin.py").write_text("import os; os._exit(0)\n")
    argv = "import sys; sys.argv = ['r18', 'backends']; from r18.cli import main; main()"
    done = run_python(argv, path=[tmp_path])
    assert done.returncode == 0, done.stderr
    table, _, below = done.stdout.partition("\n\n")
    assert any(line.split()[:2] == ["broken", "unavailable"] for line in table.splitlines())
    assert "broken 1.2" in table
    cause = "broken: RuntimeError: the wrong moon, in broken_plugin.py:1\n"
    assert f"{cause}  This is a fault of that plugin; to see" in below
    assert "lost: ModuleNotFoundError" in below
    assert "Install the package that provides lost_plugin, or the extra" in below
    assert "gone: its process exited with code 0 when it was imported or probed" in below
    assert any(line.startswith("numpy") for line in table.splitlines())


# -- schedule and plan -------------------------------------------------------------------------


def test_schedule_totals(command: Command) -> None:
    text = command.output("schedule")
    lines = text.splitlines()
    header = ["step", "op", "inputs", "output", "MACs", "parameters", "bytes"]
    assert lines[0].split() == header
    first = ["conv1", "conv2d", "7×7/2", "1×3×224×224", "1×64×112×112", "118,013,952", "9,408"]
    assert lines[2].split() == [*first, "3,211,264"]
    total = next(line for line in lines if line.startswith("total"))
    assert total.split()[1:5] == ["68", "steps", "1,814,073,344", "11,689,512"]
    assert "resnet18: 1.814 GMAC" in lines[-1]
    assert "11,689,512 parameters" in lines[-1]


def test_schedule_as_json_adds_up(command: Command) -> None:
    data = json.loads(command.output("schedule", "--network", "tiny", "--batch", 3, "--json"))
    assert data["input"] == [3, 3, 32, 32]
    for key, total in data["totals"].items():
        assert total == sum(step[key] for step in data["steps"])
    steps = {step["step"]: step for step in data["steps"]}
    assert steps["conv1"]["settings"]["kernel_size"] == [7, 7]
    assert steps["layer1.0.add"]["inputs"] == [[3, 8, 8, 8], [3, 8, 8, 8]]
    assert steps["fc"]["output"] == [3, 10]
    assert steps["fc"]["bytes"] == 120


def test_schedule_at_another_size_and_level(command: Command) -> None:
    data = json.loads(command.output("schedule", "--fusion", "all", "--image-size", 64, "--json"))
    assert data["input"] == [1, 3, 64, 64]
    assert len(data["steps"]) == 23
    assert {step["op"] for step in data["steps"]} == {"conv2d", "maxpool2d", "gap", "linear"}


def test_a_step_of_two_ops_shows_both() -> None:
    step = schedule_rows(fuse_pool(fuse(tiny(), "all")), 1)[0]
    assert step["label"] == "conv2d+bias+relu 7×7/2 + maxpool2d 3×3/2"
    assert (step["op"], step["makes"], step["output"]) == (
        "conv2d_maxpool2d",
        "maxpool",
        [1, 8, 8, 8],
    )
    assert step["settings"]["pool"]["stride"] == (2, 2)
    assert json.loads(json.dumps(step))["settings"]["conv"]["relu"] is True


def test_a_plan_that_fuses_the_pooling_shows_it(command: Command) -> None:
    asked = ("plan", "--backend", "pooling_backends:Pooling", "--network", "tiny")
    first = json.loads(command.output(*asked, "--json"))["steps"][0]
    assert (first["step"], first["kernel"]) == ("conv1", "faulty/conv2d_maxpool2d/plain/fp32")
    assert first["problem"].startswith("conv2d+bias+relu+maxpool2d(in_channels=3, ")
    apart = command.output(*asked, "--kernel", "maxpool=*")
    assert "faulty/maxpool2d/plain/fp32" in apart
    assert "conv2d_maxpool2d" not in apart


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--network", "resnet19"), "unknown network 'resnet19', did you mean 'resnet18'?"),
        (("--fusion", "al"), "unknown fusion level 'al', did you mean 'all'?"),
    ],
)
def test_schedule_refuses_with_the_known_names(
    command: Command, args: tuple[str, ...], message: str
) -> None:
    text = command.refusal("schedule", *args)
    assert message in text
    assert "known: " in text


@pytest.mark.parametrize(
    "args",
    [
        ("check", "torch.nn.functional:relu"),
        ("sanitize", "--backend", "numpy"),
        ("perturb", "--backend", "numpy"),
        ("mutate", "--backend", "numpy"),
    ],
    ids=lambda args: args[0],
)
def test_the_oracle_refuses_an_unknown_network_before_it_runs(
    command: Command, args: tuple[str, ...]
) -> None:
    message = "unknown network 'resnet19', did you mean 'resnet18'?"
    assert message in command.refusal(*args, "--network", "resnet19")


@pytest.mark.parametrize(
    "args",
    [("tune", "--out"), ("verify", "--junit"), ("kernels", "--backend")],
    ids=lambda args: args[0],
)
def test_a_name_that_no_file_can_have_is_an_error_in_words(
    command: Command, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = command.refusal(*args, "o" * 300)
    assert "ooo" in refused
    assert "the file system takes no name of that length" in refused


@pytest.mark.parametrize(
    ("args", "runs"),
    [
        (("verify", "--backend", "numpy", "--record"), "r18_oracle.cli.verify._verified"),
        (("mutate", "--backend", "numpy", "--record"), "r18_oracle.cli.mutate._score"),
        (
            ("evaluate", "--images", ".", "--backend", "numpy", "--record"),
            "r18.cli.evaluate.run_job",
        ),
        (("bench", "--backends", "numpy", "--record"), "r18.bench.run.bench"),
        (("profile", "--backend", "numpy", "--record"), "r18.bench.profile_run.profile"),
        (("roofline", "--backend", "numpy", "--measure"), "r18.bench.ceilings.measure"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_folder_of_records_that_cannot_be_written_is_refused_before_the_run(
    command: Command,
    args: tuple[str, ...],
    runs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*asked: Any, **options: Any) -> None:
        raise AssertionError("it ran")

    module, _, function = runs.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), function, never)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK or path != tmp_path)
    text = command.refusal(*args, "--records", tmp_path)
    assert f"--records {tmp_path}: '{tmp_path}' cannot be written" in text


def test_export_refuses_a_format_with_all_that_it_knows(command: Command) -> None:
    text = command.refusal("export", "--network", "tiny", "--format", "onnx", "--out", "x")
    assert "unknown export format 'onnx'" in text
    assert "known: bin, npz, qdq, safetensors" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tune", "--backend", "numpy", "--out", "folder"), "--out 'folder' is a folder"),
        (("tune", "--backend", "numpy", "--out", "file/t.json"), "cannot write 'file/t.json': "),
        (("profile", "--trace", "file"), "--trace file: 'file' is no folder"),
        (("bench", "--benchmark-json", "folder"), "--benchmark-json 'folder' is a folder"),
        (("verify", "--junit", "folder"), "--junit 'folder' is a folder"),
        (("verify", "--html", "file/page.html"), "cannot write 'file/page.html': "),
        (("report", "--svg", "file"), "--svg file: 'file' is no folder"),
        (("bench", "--record", "--records", "file"), "--records file: 'file' is no folder"),
        (("roofline", "--measure", "--records", "file"), "--records file: 'file' is no folder"),
        (("evaluate", "--images", "folder", "--records", "file/r"), "file' is no folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    command: Command,
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("keep")
    refused = command.refusal(*args)
    assert message in refused
    assert "name a f" in refused or "choose another place" in refused
    assert "backend:" not in refused, "it was chosen, so a device was asked"
    assert Path("file").read_text() == "keep"


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (("verify", "--html"), "page"),
        (("verify", "--junit"), "JUnit file"),
        (("bench", "--benchmark-json"), "JSON file of pytest-benchmark"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
@pytest.mark.parametrize(
    "text", ["print(1)\n", "{}", "[1]", "<!-- -->" * 9999 + "<testsuite/>", "<testsuites2/>"]
)
def test_another_kind_of_file_is_refused_before_anything_runs(
    command: Command, args: tuple[str, ...], kind: str, text: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    refused = command.refusal(*args, mine)
    assert f"{args[-1]} '{mine}' is no {kind}; name another file, or delete it" in refused
    assert "backend:" not in refused, "it was chosen, so a device was asked"
    assert mine.read_text() == text


def test_plan_shows_kernels_and_the_arena(command: Command) -> None:
    text = command.output("plan", "--backend", "numpy", "--network", "tiny", "--batch", 2)
    lines = text.splitlines()
    assert lines[0].split() == ["step", "kernel", "layout", "offset", "bytes", "workspace"]
    assert lines[2].split()[:3] == ["conv1", "numpy/conv2d/im2col/fp32", "nchw"]
    assert lines[-1].startswith("arena: ")


def test_plan_shows_what_runs_side_by_side(command: Command) -> None:
    asked = ("plan", "--backend", "cupy", "--network", "tiny", "--precision", "fp16")
    steps = [f"layer{stage}.0.downsample.0" for stage in (2, 3, 4)]
    assert (
        f"each runs at the same time as the step before it: {', '.join(steps)}\n"
        in command.output(*asked)
    )
    found = json.loads(command.output(*asked, "--json"))["steps"]
    assert [step["step"] for step in found if step["beside"]] == steps
    asked = ("plan", "--backend", "numpy", "--network", "tiny")
    assert "at the same time as the step" not in command.output(*asked)


def test_plan_shows_what_a_kernel_chooses(command: Command) -> None:
    """`plan` shows a kernel's choice, in a column that is there only if a kernel has one."""
    asked = ("plan", "--backend", "cupy", "--precision", "fp16", "--batch", 64)
    lines = command.output(*asked).splitlines()
    assert lines[0].split()[:4] == ["step", "kernel", "choice", "layout"]
    assert lines[3].split()[:3] == [
        *("layer1.0.conv1", "cupy/conv2d/implicit_gemm_wgmma_stationary/fp16/nhwc", "m64n112k64s6")
    ]
    steps = {step["step"]: step for step in json.loads(command.output(*asked, "--json"))["steps"]}
    assert steps["layer1.0.conv1"]["choice"] == "m64n112k64s6"
    assert steps["avgpool"]["choice"] is None


def test_plan_as_on_a_device_follows_its_table(command: Command) -> None:
    asked = ("plan", "--backend", "cupy", "--batch", 64, "--json")
    here, there = (
        {step["step"]: step["kernel"] for step in json.loads(command.output(*words))["steps"]}
        for words in (asked, (*asked, "--device", "nvidia-h200"))
    )
    table = read_table(shipped_table("cupy", "nvidia-h200"))
    problems = fuse_pool(fuse(resnet18(), "all")).problems(64)
    tuned = {step: table.best(problem, "fp32") for step, problem in problems.items()}
    assert {step: there[step] for step in there if tuned[step]} == {
        step: best.kernel for step, best in tuned.items() if best
    }
    assert sum(here[step] != there[step] for step in there) > 5
    said = command.refusal("plan", "--backend", "cupy", "--device", "nvidia-a100")
    assert "unknown device with a table of 'cupy' 'nvidia-a100'" in said
    assert "known: nvidia-h100-80gb-hbm3, nvidia-h200" in said


def test_plan_as_json_with_kernel_overrides(command: Command) -> None:
    data = json.loads(
        command.output(
            *("plan", "--backend", "numpy", "--network", "tiny", "--precision", "fp64"),
            *("--kernel", "conv2d=numpy/conv2d/direct/*", "--json"),
            *("--kernel", "conv1=numpy/conv2d/im2col/fp64"),
        )
    )
    kernels = {step["step"]: step["kernel"] for step in data["steps"]}
    assert kernels["conv1"] == "numpy/conv2d/im2col/fp64"
    assert kernels["layer1.0.conv1"] == "numpy/conv2d/direct/fp64"
    assert 0 < data["arena_bytes"] < data["naive_bytes"]
    for step in data["steps"]:
        assert 0 <= step["offset"] <= step["offset"] + step["bytes"] <= data["arena_bytes"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kernel", "conv2d"), "--kernel takes STEP=KERNEL or OP=KERNEL"),
        (("--kernel", "conv3d=*"), "unknown step or op in a kernel override 'conv3d'"),
        (("--kernel", "conv2d=numpy/conv2d/winograd/*"), "unknown kernel"),
        (("--precision", "bf16"), "no kernel takes"),
        (("--precision", "fp31"), "unknown precision 'fp31', did you mean"),
    ],
)
def test_plan_refuses(command: Command, args: tuple[str, ...], message: str) -> None:
    assert message in command.refusal("plan", "--backend", "numpy", *args)


def test_overrides_and_lists_are_checked() -> None:
    assert kernel_overrides(["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}
    for pairs in (["=x"], ["x="], ["x"], ["a=b", "a=c"]):
        with pytest.raises(UsageError, match="--kernel"):
            kernel_overrides(pairs)
    assert listed("a, b", "--x") == ["a", "b"]
    for text in ("", "a,", "a,a"):
        with pytest.raises(UsageError, match="--x takes different values"):
            listed(text, "--x")


# -- classify ----------------------------------------------------------------------------------


def test_an_unknown_backend_prints_the_known_ones() -> None:
    done = process("classify", "x.jpg", R18_BACKEND="nunpy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("r18: unknown backend 'nunpy', did you mean 'numpy'?\n  known: ")
    assert "Traceback" not in done.stderr
    known = done.stderr.splitlines()[1].removeprefix("  known: ").split(", ")
    assert known == sorted([*installed(), "auto"])


def test_the_option_is_stronger_than_the_variable(command: Command) -> None:
    args = ("classify", "x.jpg", "--backend", "torhc")
    assert "'torhc', did you mean 'torch'?" in command.refusal(*args, R18_BACKEND="numpy")


def test_classify_as_text_with_synthetic_weights_warns(command: Command, photo: Path) -> None:
    done = command("classify", photo, photo, "--weights", "synthetic", R18_BACKEND="numpy")
    assert done.returncode == 0, done.stderr
    assert "backend: numpy, CPU" in done.stderr
    assert "taken by auto" not in done.stderr
    assert "warning: synthetic weights were never trained" in done.stderr
    first, second = done.stdout.strip().split("\n\n")
    assert first == second
    lines = first.splitlines()
    assert lines[0] == str(photo)
    assert len(lines) == 6
    probability, index, *name = lines[1].split()
    assert probability.endswith("%")
    assert r18_class_name(int(index)) == " ".join(name)


def r18_class_name(index: int) -> str:
    names = json.loads(
        (ROOT / "r18" / "images" / "imagenet_classes.json").read_text(encoding="utf-8")
    )
    return str(names[index])


class OnlySingle(NumpyBackend):
    """NumPy's kernels in fp32."""

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(one for one in super().kernels() if one.precision.name == "fp32")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("report", "--dumps", "a", "--out", "b"), "'--dumps' needs 2 values; '--out' is an"),
        (("report", "--out", "--svg", "a"), "'--out' needs a value; '--svg' is an"),
        (("verify", "--backend", "--help"), "'--backend' needs a value; '--help' is an"),
    ],
)
def test_an_option_is_not_the_value_of_another(
    command: Command, args: tuple[str, ...], message: str
) -> None:
    done = command(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_value_may_look_like_an_option(command: Command, tmp_path: Path) -> None:
    """Joined with `=`, a value is whatever follows; a positional argument has no name."""
    done = command("report", f"--records={tmp_path}", "--out=--svg")
    assert done.returncode == 2
    assert "is an option" not in done.stderr
    done = command("diff", "expected", "--atol=1", "got")
    assert "'expected' does not exist" in done.stderr


@pytest.mark.parametrize("name", ["classify", "plan", "evaluate", "tune", "roofline", "step"])
def test_auto_without_a_precision_names_the_backends_that_have_it(
    command: Command, photo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """The listing is replaced: what is installed and can run differs between machines."""
    cpu_ = DeviceInfo("cpu", "CPU")
    able = Entry(Listing("exact", "", cpu_, "", ""), ("fp64",))
    absent = Entry(Listing("absent", "", None, "no GPU", ""), ("fp64",))
    found = [able, absent, Entry(Listing("rough", "", cpu_, "", ""), ("fp32",))]
    monkeypatch.setattr("r18.runtime.listing.entries", lambda: found)
    monkeypatch.setattr(options, "get_backend", lambda name: OnlySingle())
    arguments: dict[str, tuple[object, ...]] = {
        "classify": (photo, "--weights", "synthetic"),
        "step": (2,),
        "evaluate": ("--images", photo.parent, "--out", tmp_path / "t.csv"),
    }
    asked = (name, *arguments.get(name, ()), "--backend", "auto", "--precision")
    refusal = command.refusal(*asked, "fp64")
    assert "backend 'numpy', which auto took, has no kernels in fp64" in refusal
    assert "\n  backends with fp64 here: exact; choose one with --backend" in refusal
    assert "`r18 backends` lists the precisions of each backend" in command.refusal(*asked, "bf16")


def test_auto_says_what_it_took(command: Command, photo: Path) -> None:
    done = command("classify", photo, "--weights", "synthetic", "--json", "--top", 2)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert f"backend: {data['backend']} (taken by auto), {data['device']}" in done.stderr
    assert data["weights"]["source"] == "synthetic:0"
    assert [image["image"] for image in data["images"]] == [str(photo)]
    assert [guess.keys() for guess in data["images"][0]["top"]] == [
        {"index": 0, "name": 0, "probability": 0}.keys()
    ] * 2


def test_a_bad_image_among_good_ones_prints_nothing_else(
    command: Command, photo: Path, tmp_path: Path
) -> None:
    args = ("classify", photo, tmp_path / "absent.jpg", "--weights", "synthetic", "--batch", 1)
    text = command.refusal(*args, R18_BACKEND="numpy")
    assert "absent.jpg: no such file" in text
    assert f"r18: {tmp_path / 'absent.jpg'}: no such file" in text  # not its place in the list
    folder = command.refusal("classify", tmp_path, "--weights", "synthetic", R18_BACKEND="numpy")
    assert "a folder, not an image" in folder


def test_classify_without_weights_that_exist(command: Command, photo: Path, tmp_path: Path) -> None:
    text = command.refusal(
        "classify", photo, "--weights", tmp_path / "absent.pth", R18_BACKEND="numpy"
    )
    assert "no such file; check the path" in text


@pytest.mark.parametrize("backend", ["numpy", "numba-cpu", "r18_torch:cpu"])
def test_photographs_get_their_classes(shared: Path, backend: str) -> None:
    labels: list[tuple[str, int]] = [
        ("n01440764_tench.JPEG", 0),
        ("n01484850_great_white_shark.JPEG", 2),
        ("n01494475_hammerhead.JPEG", 4),
        ("n01498041_stingray.JPEG", 6),
        ("n01514859_hen.JPEG", 8),
        ("n01530575_brambling.JPEG", 10),
        ("n01532829_house_finch.JPEG", 12),
        ("n01537544_indigo_bunting.JPEG", 14),
    ]
    weights = shared / "weights" / "resnet18-photos1000.pth"
    files = [shared / "photos" / file for file, _ in labels]
    args = ("classify", *files, "--weights", weights, "--batch", 3, "--json")
    done = process(*args, R18_BACKEND=backend)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    best = [image["top"][0] for image in data["images"]]
    assert [guess["index"] for guess in best] == [label for _, label in labels]
    assert best[1]["name"] == "great white shark"
    assert min(guess["probability"] for guess in best) > 0.5


# -- bench -------------------------------------------------------------------------------------

QUICK = ("bench", "--network", "tiny", "--warmup", 1, "--repeat", 2)


def test_bench_as_a_table(command: Command) -> None:
    done = command(*QUICK, "--backends", "numpy", "--batch", "1,2", "--per-step")
    assert done.returncode == 0, done.stderr
    assert "time / torchvision eager" in done.stdout
    assert "numpy/conv2d/im2col/fp32" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("numpy  ")]
    assert [row[:4] for row in rows] == [["numpy", "cpu", "fp32", n] for n in ("1", "2")]
    assert "left out: torchvision eager, fp32, batch 1: torchvision has no" in done.stderr


def test_bench_from_host_memory(command: Command, tmp_path: Path) -> None:
    asked = ("--backends", "numpy", "--batch", 2, "--from-host", "--per-step", "--record")
    asked += ("--records", tmp_path)
    done = command(*QUICK, *asked)
    assert done.returncode == 0, done.stderr
    assert "\nfrom host memory\n" in done.stdout
    assert "of device-only" in done.stdout
    record = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text("utf-8"))
    assert record["device"] == str(cpu())
    (row,) = record["groups"]["tiny/fp32/all/b2"]["rows"]
    assert row["from_host"]["nbytes"] == 2 * 3 * 32 * 32
    assert len(row["from_host"]["runs_ms"]) == 5


def test_bench_does_not_record_a_simulator(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceInfo("cpu", "a simulator", simulated=True)
    monkeypatch.setattr("r18_numpy.Backend.probe", lambda self: device)
    done = command(*QUICK, "--backends", "numpy", "--record", "--records", tmp_path)
    assert done.returncode == 2
    assert "--record: a simulator: its times say nothing of hardware" in done.stderr
    assert not list(tmp_path.iterdir())


def test_bench_keeps_what_it_has_timed_when_the_rest_fails(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was timed is recorded although the next one does not fit in memory."""
    monkeypatch.setattr("r18.backend.options.MOST_IMAGES", 10**12)  # or it is refused at once
    asked = ("--backends", "numpy", "--batch", f"2,{10**9}", "--record", "--records", tmp_path)
    with pytest.raises(MemoryError):
        command(*QUICK, *asked)
    record = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text("utf-8"))
    assert list(record["groups"]) == ["tiny/fp32/all/b2"]


def test_bench_as_json_of_all(command: Command) -> None:
    data: dict[str, Any] = json.loads(command.output(*QUICK, "--batch", 1, "--json"))
    assert {"numpy", "torch"} <= {row["backend"] for row in data["rows"]}
    assert data["ratio"] == "time / torchvision eager"
    assert data["machine"]["cpus"] >= 1
    assert {"contender", "reason"} == data["skipped"][-1].keys()
    for row in data["rows"]:
        assert len(row["samples_ms"]) == row["repeat"] == 2
        assert row["warmup"] == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--backends", "nunpy"), "unknown backend 'nunpy', did you mean 'numpy'?"),
        (("--backends", "numpy,numpy"), "--backends takes different values"),
        (("--backends", "numpy", "--precision", "bf16"), "no kernel takes"),
        (("--backends", "numpy", "--batch", "two"), "--batch takes integers"),
        (("--backends", "numpy", "--batch", "0"), "batch must be at least 1"),
    ],
)
def test_bench_refuses(command: Command, args: tuple[str, ...], message: str) -> None:
    assert message in command.refusal(*QUICK, *args)


def test_bench_takes_the_backend_of_the_variable(command: Command) -> None:
    assert "unknown backend 'nunpy'" in command.refusal(*QUICK, R18_BACKEND="nunpy")


def tool_process(*args: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "tools" / "bench_vs_torch_e2e.py")
    return run_python(
        f"import sys, runpy; sys.argv = {[script, *args]!r}; "
        f"runpy.run_path({script!r}, run_name='__main__')"
    )


def test_the_tool_has_the_usual_options_and_refuses_as_the_command_does() -> None:
    text = tool_process("--help").stdout
    for option in ("--manifest", "--weights", "--backend", "--batch", "--repeat"):
        assert option in text
    done = tool_process("--backend", "nunpy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench_vs_torch_e2e: unknown backend 'nunpy'")


def test_the_tool_times_resnet18_beside_torchvision() -> None:
    asked = ("--backend", "numpy", "--warmup", "0", "--repeat", "1", "--json")
    done = commands.tool("bench_vs_torch_e2e", *asked)
    assert done.code == 0, done.err
    ours, peer = json.loads(done.out)["rows"]
    assert (ours["backend"], peer["backend"]) == ("numpy", "torchvision eager")
    assert ours["ratio"] == ours["median_ms"] / peer["median_ms"]
    assert peer["ratio"] == 1
