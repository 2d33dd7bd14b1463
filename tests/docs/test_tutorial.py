"""The tutorial works as it is printed: its files are written, its commands run, its output shown.

Output is compared line by line, in its order; numbers and versions may differ, `…` stands for any
lines, or for the rest of one. A command's exit code is 0, unless `echo $?` behind it shows another.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import venv
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from r18_oracle.findings import load
from r18_oracle.search.worker import THREAD_VARIABLES
from support import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
MOST_LINES = 300

_BLOCK = re.compile(
    r"(?:^<!-- (?P<what>[a-z ]+): (?P<about>[^\n]+) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


# -- the page, as steps ------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: the instruction in its comment, and its text."""

    line: int
    what: str
    about: str
    language: str
    body: str


@dataclass
class Command:
    """A command line, the lines that the page shows below it, and how it is to end."""

    line: str
    shown: list[str] = field(default_factory=list)
    code: int = 0


def blocks(text: str) -> list[Block]:
    return [
        Block(
            text.count("\n", 0, match.start()) + 1,
            match["what"] or "",
            match["about"] or "",
            match["language"],
            match["body"],
        )
        for match in _BLOCK.finditer(text)
    ]


def commands(body: str) -> list[Command]:
    """The commands of a console block; `echo $?` gives the exit code of the one before it."""
    found: list[Command] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append(Command(line.removeprefix("$ ")))
        else:
            found[-1].shown.append(line)
    for command, following in pairwise(found):
        if following.line == "echo $?":
            command.code = int(following.shown[0])
    return found


def edited(text: str, diff: str) -> str:
    """The text with each `-` line of a diff replaced by the `+` line behind it."""
    lines = diff.splitlines()
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert (old[0], new[0]) == ("-", "+")
        assert text.count(old[1:] + "\n") == 1, f"the file has no such line: {old[1:]}"
        text = text.replace(old[1:] + "\n", new[1:] + "\n")
    return text


# -- output, loosely ---------------------------------------------------------------------------


def plain(line: str) -> str:
    """The line without what may vary: numbers, versions, digests, the machine, column widths."""
    line = re.sub(r"CPU \([^)]*\)", "CPU", line)
    line = re.sub(r"\.[0-9a-f]{8}\.json", ".json", line)
    line = re.sub(r"(NumPy|PyTorch) [\d.]+\S*", r"\1", line)
    line = re.sub(r"\d[\d.,]*(e[+-]?\d+)?%?|\b(inf|all)\b(?=\s|$)", "#", line)
    line = re.sub(r"-{3,}", "---", line)
    return " ".join(line.split())


def missing(shown: list[str], output: str) -> str | None:
    """The first shown line that the output lacks at its place, or None."""
    actual = [plain(line) for line in output.splitlines() if line.strip()]
    at, free = 0, True
    for line in shown:
        if line == "…":
            free = True
        elif line.strip():
            wanted, open_ended = plain(line.removesuffix("…")), line.endswith("…")
            rest = actual[at:] if free else actual[at : at + 1]
            hits = [
                index
                for index, found in enumerate(rest, start=at + 1)
                if found == wanted or (open_ended and found.startswith(wanted))
            ]
            if not hits:
                return line
            at, free = hits[0], False
    return None


# -- running it --------------------------------------------------------------------------------


class Shell:
    """One bash for the whole page, so that exported variables stay."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._code = 0

    def run(self, line: str) -> tuple[int, str]:
        """Run a command; returns its exit code and output."""
        end = "-- end of command --"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The command sees the code of the one before it, and no input.
        self._process.stdin.write(f'(exit {self._code})\n{line}\necho "{end} $?"\n')
        self._process.stdin.flush()
        output: list[str] = []
        for printed in self._process.stdout:
            text, mark, code = printed.partition(end)
            output.append(text)
            if mark:
                self._code = int(code)
                return self._code, "".join(output)
        raise AssertionError(f"the shell ended at: {line}\n{''.join(output)}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def environment(folder: Path) -> dict[str, str]:
    """A new virtual environment with what this one has, so that the page may install into it.

    pip takes everything from this environment, as it has no network.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    ours = sysconfig.get_path("purelib")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n", "utf-8")
    for name, code in (
        ("r18", "from r18.cli import main"),
        ("pip", "from pip._internal.cli.main import main"),
    ):
        script = folder / "bin" / name
        lines = (f"#!{folder}/bin/python", "import sys", code)
        body = "\n".join([*lines, "if __name__ == '__main__':", "    sys.exit(main())"])
        script.write_text(f"{body}\n", "utf-8")
        script.chmod(0o755)
    found = {k: v for k, v in os.environ.items() if not k.startswith(("R18_", "PYTHON", "PIP_"))}
    return found | {
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as "isolate: no"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
        **dict.fromkeys(THREAD_VARIABLES, "1"),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the whole page was executed."""
    folder: Path = tmp_path_factory.mktemp("tutorial")
    shell = Shell(folder, environment(tmp_path_factory.mktemp("environment")))
    try:
        for block in blocks(PAGE.read_text("utf-8")):
            follow(block, folder, shell)
    finally:
        shell.close()
    return folder


def follow(block: Block, folder: Path, shell: Shell) -> None:
    match block.what, block.language:
        case "file", _:
            (folder / block.about).write_text(block.body, "utf-8")
        case "edit", "diff":
            path = folder / block.about
            path.write_text(edited(path.read_text("utf-8"), block.body), "utf-8")
        case "", "console":
            for command in commands(block.body):
                code, output = shell.run(command.line)
                where = f"{PAGE.name}:{block.line}: $ {command.line}\n{output}"
                assert code == command.code, f"exit code {code} of {where}"
                line = missing(command.shown, output)
                assert line is None, f"'{line}' is not in the output of {where}"
        case "not run", "console":
            pass
        case _:
            raise AssertionError(f"{PAGE.name}:{block.line}: what is to be done with this block?")


# -- tests -------------------------------------------------------------------------------------


def test_the_page_can_be_followed(ran: Path) -> None:
    """Every file, edit, command and line of output of the page works as printed."""
    assert (ran / "exports" / "findings").is_dir()


def test_the_finding_is_as_the_page_explains_it(ran: Path) -> None:
    """The finding has a vertical stride and more rows than a band, and is worst in the second."""
    (path,) = (ran / "exports" / "findings").glob("*.json")
    assert json.loads(path.read_text("utf-8"))["finding"] == 1
    finding = load(path)
    assert finding.check == "exact"
    assert finding.problem is not None
    assert finding.problem.op.stride[0] > 1
    assert finding.problem.output[2] > 4
    assert finding.coordinate is not None
    assert finding.coordinate[2] >= 4


def test_the_page_is_short_and_little_of_it_is_not_run() -> None:
    text = PAGE.read_text("utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    skipped = [block for block in blocks(text) if block.what == "not run"]
    for block in skipped:
        for command in commands(block.body):
            assert command.line.split()[0] in ("python3", ".", "pip", "pytest")
    assert text.count("```") == 2 * len(blocks(text))


@pytest.mark.parametrize(
    ("shown", "output", "lacks"),
    [
        (["a 1.5", "…", "c"], "a 2\nb\nc", None),
        (["a", "c"], "a\nb\nc", "c"),
        (["…", "c", "b"], "a\nb\nc", "b"),
        (["x  FAIL"], "x ok", "x  FAIL"),
        (["1 finding"], "2 findings", "1 finding"),
        (["one …", "two"], "one more\ntwo", None),
        (["one …"], "more than one more", "one …"),
        ([], "anything", None),
    ],
)
def test_output_is_compared(shown: list[str], output: str, lacks: str | None) -> None:
    assert missing(shown, output) == lacks
