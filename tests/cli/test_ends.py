"""How a command ends early: one line on stderr, an exit code of its own, nothing left behind.

Every command here is a process of its own. Where a signal has to come at a certain moment, the
process sends it to itself, as it imports a module or flushes a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from r18 import ends
from support import ROOT


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """Restore default signals, as a test run under `nohup` would pass ignored ones on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


AT_IMPORT = """
import os, sys

class Moment:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Moment())
"""
AT_FLUSH = """
import os, shutil

first, *others = {numbers}
remove = shutil.rmtree

def fsync(descriptor):
    os.kill(os.getpid(), first)

def rmtree(*arguments, **options):
    for number in others:
        os.kill(os.getpid(), number)
    remove(*arguments, **options)

os.fsync, shutil.rmtree = fsync, rmtree
"""
COMMAND = """
import sys
sys.argv = ["r18", *{arguments!r}]
from r18.cli import main
main()
"""


def command(*arguments: object, before: str = "") -> list[str]:
    code = before + COMMAND.format(arguments=list(map(str, arguments)))
    return [sys.executable, "-c", code]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "R18_BACKEND"}
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path} | more


def run(
    *arguments: object, before: str = "", stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, before=before),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )


def test_a_closed_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run("schedule", stdout=writing)
    os.close(writing)
    said = "r18: the reader of the output has closed the pipe\n"
    assert (done.returncode, done.stderr) == (ends.CLOSED_PIPE, said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("arguments", [("schedule",), ("--help",), ("plan", "--json")])
def test_a_full_disk_at_stdout(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = run(*arguments, "--backend=numpy" if "plan" in arguments else "--help", stdout=full)
    said = "r18: cannot write stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (ends.UNWRITABLE, said)


@pytest.mark.parametrize(
    ("module", "name", "code", "word"),
    [
        ("r18.cli.app", "SIGINT", 130, "interrupted"),  # before the command line is there
        ("numpy", "SIGINT", 130, "interrupted"),
        ("r18.cli.kernels", "SIGTERM", 143, "terminated"),
        ("r18_oracle.cli.diff", "SIGINT", 130, "interrupted"),  # where a plugin's faults are caught
        ("r18_numpy", "SIGTERM", 143, "terminated"),  # in the command
        ("r18_numpy", "SIGINT", 130, "interrupted"),
        ("r18_numpy", "SIGHUP", 129, "hung up"),
    ],
)
def test_a_signal_at_any_moment(module: str, name: str, code: int, word: str) -> None:
    """A signal during any import ends the command with one line on stderr."""
    moment = AT_IMPORT.format(module=module, number=int(getattr(signal, name)))
    asked = ("diff", "a", "b") if "diff" in module else ("kernels", "--backend", "numpy")
    done = run(*asked, before=moment)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"r18: {word}\n")


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_signal_leaves_no_file_that_is_half_written(numbers: list[int], tmp_path: Path) -> None:
    """A signal leaves no half-written file, even if a second one follows at once."""
    arguments = ("export", "--out", tmp_path / "out", "--weights", "synthetic", "--network", "tiny")
    done = run(*arguments, before=AT_FLUSH.format(numbers=list(map(int, numbers))))
    assert done.returncode == 128 + numbers[0]
    assert done.stderr == f"r18: {ends.WORDS[done.returncode]}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("letters", [1, 100], ids=["short", "too_long_for_a_socket"])
def test_ctrl_c_ends_workers_and_removes_their_folder(letters: int, tmp_path: Path) -> None:
    """Ctrl-C, which the terminal sends to all processes, ends workers and removes their folder."""
    hanging, temporary = tmp_path / "hanging", tmp_path / ("t" * letters)
    temporary.mkdir()
    process = subprocess.Popen(
        command("verify", "--backend", "hostile_backends:Hangs", "--workers", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(R18_TEST_HANGING=str(hanging), TMPDIR=str(temporary)),
        start_new_session=True,
        cwd=tmp_path,
    )
    while not (hanging.exists() and hanging.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert list(temporary.iterdir())
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "r18: interrupted\n")
    assert list(temporary.iterdir()) == []
    assert not psutil.pid_exists(int(hanging.read_text()))


def run_code(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code that defines a function `command` as a command."""
    text = f"{code}\nfrom r18 import ends\nends.run(command)"
    return subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_a_signal_after_the_command() -> None:
    """Python waits for its threads then, and would print where. The signal comes when it waits: one
    that comes just before is only noticed with the next.
    """
    code = """
import os, signal, threading, time

def late():
    threading.main_thread().join()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)

def command():
    threading.Thread(target=late).start()
"""
    done = run_code(code)
    assert (done.returncode, done.stderr) == (130, "r18: interrupted\n")


def test_a_signal_that_became_another_error_is_still_a_signal() -> None:
    code = """
import os, signal, sys

def command():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        sys.exit(2)
"""
    done = run_code(code)
    assert (done.returncode, done.stderr) == (143, "r18: terminated\n")


def test_what_the_user_should_know_is_in_the_line() -> None:
    code = """
def command():
    raise KeyboardInterrupt("the same command continues")
"""
    assert run_code(code).stderr == "r18: interrupted: the same command continues\n"


def test_an_ignored_signal_stays_ignored() -> None:
    """An ignored signal stays ignored, as with nohup or in the background of a shell."""
    code = """
import os, signal
for name in ("SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)

def command():
    for name in ("SIGINT", "SIGHUP"):
        os.kill(os.getpid(), getattr(signal, name))
    print("done")
"""
    done = run_code(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_another_os_error_keeps_its_traceback() -> None:
    """An OSError that comes from no stream is a bug and keeps its traceback."""
    code = """
import errno, os

def command():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
"""
    done = run_code(code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
