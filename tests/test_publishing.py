"""The published distribution: `python -m build` makes it, and it runs with nothing else installed.

No network: an environment has links to what the declared dependencies bring, and to nothing
else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email import message_from_string
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import r18
from r18.cpu import model_slug
from r18_oracle.search.worker import THREAD_VARIABLES
from support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PUBLISHED = (
    *("r18", "backends", "oracle", "tests", "docs", "tools", "exports/records"),
    *("pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"),
    *("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "mkdocs.yml", ".pre-commit-config.yaml"),
    *(".ci", ".github", "Dockerfile", ".dockerignore"),
)
PACKAGES = {"r18", "r18_cupy", "r18_numba", "r18_numba_cpu", "r18_numpy", "r18_oracle", "r18_torch"}
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")


# -- building ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A wheel made from the sdist, the sdist, and a wheel made from the checkout."""

    wheel: Path
    sdist: Path
    direct: Path


def build(source: Path, out: Path, *options: str) -> None:
    """`python -m build` with the setuptools that is here, as there is no network to fetch one."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder: Path = tmp_path_factory.mktemp("published")
    source = folder / "source"  # building writes next to the source
    for name in PUBLISHED:
        at = source / name
        at.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, at, ignore=LEFT_OUT)
        else:
            shutil.copy2(ROOT / name, at)
    build(source, folder / "dist")
    build(source, folder / "direct", "--wheel")
    (wheel,), (sdist,) = folder.glob("dist/*.whl"), folder.glob("dist/*.tar.gz")
    (direct,) = folder.glob("direct/*.whl")
    return Built(wheel, sdist, direct)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_names_say_what_it_is(built: Built) -> None:
    assert built.wheel.name == f"r18-{r18.__version__}-py3-none-any.whl"
    assert built.sdist.name == f"r18-{r18.__version__}.tar.gz"


def test_the_sdist_makes_the_same_wheel(built: Built) -> None:
    assert contents(built.wheel) == contents(built.direct)


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(built: Built) -> None:
    names = set(contents(built.wheel))
    folders = {name: ROOT / where for where in ("backends", "oracle") for name in PACKAGES}
    folders = {name: path for name, path in folders.items() if (path / name).is_dir()}
    expected = set()
    for package in PACKAGES:
        base = next(b for b in (ROOT, ROOT / "backends", ROOT / "oracle") if (b / package).is_dir())
        expected |= {
            path.relative_to(base).as_posix()
            for path in (base / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    info = f"r18-{r18.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected
    suffixes = {".py", ".cu", ".cuh", ".json", ".css", ".jpg"}
    assert {Path(name).suffix for name in expected} >= suffixes
    assert {name.partition("/")[0] for name in expected} == PACKAGES


def test_every_package_says_that_it_is_typed(built: Built) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(contents(built.wheel))


def test_the_metadata(built: Built) -> None:
    files = contents(built.wheel)
    info = f"r18-{r18.__version__}.dist-info"
    metadata = message_from_string(files[f"{info}/METADATA"].decode())
    assert metadata["Name"] == "r18"
    assert metadata["Version"] == PROJECT["version"] == r18.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    # Nothing an index would show leads to a file of a checkout.
    shown = metadata.get_payload()
    assert shown == (ROOT / "docs" / "package.md").read_text("utf-8")
    assert not re.search(r"\]\((?!https://)", shown)
    extras = re.findall(r"^\| (`.*`) \|", shown, re.MULTILINE)
    named = {name for words in extras for name in re.findall(r"`([^`]+)`", words)}
    assert named == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}
    points = files[f"{info}/entry_points.txt"].decode()
    for name, value in PROJECT["entry-points"]["r18.backends"].items():
        assert f"{name} = {value}" in points
    assert f"{info}/licenses/LICENSE" in files


def test_the_sdist_holds_what_is_needed_to_test_it(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tests", "docs", "tools", "exports/records"):
        files = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
        }
        assert files <= names, files - names
    pages = {"CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "Dockerfile"}
    assert {"LICENSE", "CITATION.cff", "Makefile", "mkdocs.yml", "pyproject.toml", *pages} <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## \[{re.escape(r18.__version__)}\] - ", text, re.MULTILINE)


# -- in an empty environment -------------------------------------------------------------------


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The installed distributions that pip would install for these requirements."""
    found: dict[str, Distribution] = {}
    todo = [Requirement(text) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = requirement.name.lower(), frozenset(requirement.extras)
        if key in seen or requirement.name == "r18":
            continue
        seen.add(key)
        try:
            here = distribution(requirement.name)
        except PackageNotFoundError as error:
            raise AssertionError(f"{requirement} is declared and not installed") from error
        found[requirement.name.lower()] = here
        for text in here.requires or ():
            needed = Requirement(text)
            wanted = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(needed.marker.evaluate(one) for one in wanted):
                todo.append(needed)
    return found


class Environment:
    """A virtual environment with the wheel, and links to distributions."""

    def __init__(self, folder: Path, wheel: Path, requirements: Iterable[str]) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        for here in closure(requirements).values():
            self._link(here)
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        done = subprocess.run(
            [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def _link(self, here: Distribution) -> None:
        tops = {file.parts[0] for file in here.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            source, target = Path(str(here.locate_file(top))), self.site / top
            if source.exists() and not target.exists():
                target.symlink_to(source)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the environment's scripts and without this process's variables."""
        kept = ("HOME", "LANG", "TMPDIR")
        variables = {name: os.environ[name] for name in kept if name in os.environ}
        variables |= dict.fromkeys(THREAD_VARIABLES, "1")
        path = os.pathsep.join([str(self.folder / "bin"), os.defpath])
        variables |= {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            [shutil.which(command[0], path=path) or command[0], *command[1:]],
            cwd=work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def output(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def core(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment after `pip install r18`."""
    return Environment(tmp_path_factory.mktemp("core"), built.wheel, PROJECT["dependencies"])


@pytest.fixture(scope="module")
def oracle(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment after `pip install 'r18[oracle]'`."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["torch"], *extras["oracle"]]
    return Environment(tmp_path_factory.mktemp("oracle"), built.wheel, wanted)


def test_the_environment_is_empty_but_for_the_declared_dependencies(core: Environment) -> None:
    code = (
        "import importlib.util as u, r18; print(r18.__file__, *("
        "n for n in ('torch', 'numba', 'cupy', 'hypothesis', 'pytest', 'scipy') if u.find_spec(n)))"
    )
    where, *others = core.output("python", "-c", code).split()
    assert Path(where).is_relative_to(core.site)
    assert others == []


def test_the_core_runs_alone(core: Environment) -> None:
    assert core.output("r18", "--version") == f"r18 {r18.__version__}\n"
    assert "11,689,512 parameters" in core.output("r18", "schedule")
    assert "numpy/conv2d/im2col/fp32" in core.output("r18", "plan", "--backend", "numpy")
    listed = {line["name"]: line for line in json.loads(core.output("r18", "backends", "--json"))}
    assert set(listed) == set(PROJECT["entry-points"]["r18.backends"])
    assert [name for name, line in listed.items() if line["available"]] == ["numpy"]
    for name in set(listed) - {"numpy"}:
        assert listed[name]["cause"]
        assert listed[name]["remedy"].startswith("pip install")


def test_the_core_classifies(core: Environment) -> None:
    code = "from PIL import Image; Image.linear_gradient('L').convert('RGB').save('photo.png')"
    core.output("python", "-c", code)
    done = core.run("r18", "classify", "photo.png", "--weights", "synthetic", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["backend"] == "numpy"
    assert len(data["images"][0]["top"]) == 5
    assert data["images"][0]["top"][0]["name"]


def test_the_core_demonstrates(core: Environment) -> None:
    """The demo runs with its own picture, and names each extra whose part it leaves out."""
    output = core.output("r18", "demo", "--network", "tiny", "--weights", "synthetic")
    assert "orange.jpg, a drawn picture: tiny on numpy" in output
    assert "pip install 'r18[oracle]'" in output
    assert "pip install 'r18[numba]'" in output
    assert re.search(r"^total +\d", output, re.MULTILINE)


def test_the_oracle_finds_the_planted_bug(oracle: Environment) -> None:
    output = oracle.output("r18", "demo", "--network", "tiny", "--weights", "synthetic")
    assert re.search(r"/r18/demo/planted\.py:divides_by_one_less, like torch", output)
    assert "verdict   wrong: " in output
    assert "divided by H·W, it passes every check" in output


def test_the_core_evaluates_and_times(core: Environment) -> None:
    """The core evaluates photographs, one of them damaged; the page asks for the extra `report`."""
    code = (
        "from pathlib import Path; from PIL import Image; Path('val').mkdir()\n"
        "for i in range(3): Image.radial_gradient('L').rotate(40 * i).save(f'val/{i}.png')\n"
        "Path('val/3.png').write_bytes(b'none')"
    )
    core.output("python", "-c", code)
    found = core.output(
        *("r18", "evaluate", "--images", "val", "--weights", "synthetic", "--network", "tiny"),
        *("--backend", "numpy", "--against", "numpy", "--against-precision", "fp64"),
        *("--out", "out.csv", "--record"),
    )
    assert "images = 4\nunreadable = 1\nagree_top1 = 3 (100.00 %)" in found
    assert "UNREADABLE: 3.png: " in found
    core.output(
        *("r18", "bench", "--backends", "numpy", "--peers", "eager", "--network", "tiny"),
        *("--batch", "1", "--repeat", "1", "--record"),
    )
    refused = core.run("r18", "report", "--evaluation", "out.csv", "--out", "r.html")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "pip install 'r18[report]'" in refused.stderr
    assert not (core.folder / "work" / "r.html").exists()
    records = core.folder / "work" / "exports" / "records"
    assert {path.name for path in records.iterdir()} == {
        f"bench-{model_slug()}.json",
        f"evaluate-{model_slug()}.json",
    }


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "--backend", "numpy"),
        ("replay", "finding.json"),
        ("mutate", "--backend", "numpy"),
        ("profile", "--backend", "numpy"),
    ],
)
def test_what_an_extra_would_bring_is_said(core: Environment, command: tuple[str, ...]) -> None:
    """A command that lacks an extra names it, without a traceback."""
    done = core.run("r18", *command)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install 'r18[" in done.stderr


def test_the_core_dumps_and_compares(core: Environment) -> None:
    """The tools for porting need no PyTorch."""
    for name in ("one", "two"):
        core.output("r18", "dump", "--backend", "numpy", "--network", "tiny", "--out", name)
    assert "all 7 checkpoints agree" in core.output("r18", "diff", "one", "two")
    core.output("r18", "export", "--weights", "synthetic", "--network", "tiny", "--out", "weights")
    core.output("r18", "fixtures", "--network", "tiny", "--outdir", "fixtures")
    step = core.output("r18", "step", "7", "--backend", "numpy", "--fixture", "fixtures")
    assert "[OK]" in step


def test_the_oracle_runs(oracle: Environment) -> None:
    text = oracle.output(
        *("r18", "verify", "--backend", "numpy", "--network", "tiny"),
        *("--kernels", "numpy/conv2d/*/fp32", "--workers", "1", "--profile", "brief"),
    )
    assert "numpy/conv2d/im2col/fp32" in text
    assert text.strip().endswith("no finding")


# -- completion --------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion_script(core: Environment, shell: str) -> None:
    script = core.output("env", f"_R18_COMPLETE=source_{shell}", "r18")
    assert f"_R18_COMPLETE=complete_{shell}" in script


def test_the_shell_that_asks_gets_its_script(core: Environment) -> None:
    script = core.output("bash", "-c", "r18 --show-completion bash; true")
    assert script.strip() == core.output("env", "_R18_COMPLETE=source_bash", "r18").strip()
    assert "complete -o default -F _r18_completion r18" in script


def test_commands_are_completed(core: Environment) -> None:
    """Bash gets completions from the installed script."""

    def offered(*words: str) -> list[str]:
        asked = (f"COMP_WORDS={' '.join(words)}", f"COMP_CWORD={len(words) - 1}")
        return core.output("env", "_R18_COMPLETE=complete_bash", *asked, "r18").split()

    assert offered("r18", "ver") == ["verify"]
    assert offered("r18", "plan", "--backend", "num") == ["numba", "numba-cpu", "numpy"]
    assert offered("r18", "verify", "--backend", "cu") == ["cupy"]
    assert offered("r18", "plan", "--fusion", "c") == ["conv_bn_relu"]
    assert offered("r18", "dump", "--precision", "fp") == ["fp64", "fp32", "fp16x3", "fp16", "fp8"]
