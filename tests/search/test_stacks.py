"""Stacks of a process: `faulthandler`'s lines are arranged, and all else is left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r18.errors import UsageError
from r18_oracle import stacks
from r18_oracle.findings import STACKS, Finding, load, save
from worker_tasks import problem

WRITTEN = """\
Thread 0x00007f0e2bfff6c0 (most recent call first):
  File "/usr/lib/python3/threading.py", line 359 in wait
  File "/home/me/mine.py", line 90 in watch
  ...

Thread 0x00007f0e3bfff6c0 [pump] (most recent call first):
  <no Python frame>

Current thread 0x00007f0e3c7ff740 (most recent call first):
  File "/home/me/mine.py", line 7 in wait
  File ???, line ??? in ???
  File "C:\\me\\mine.py", line 39 in Network.run
  File "/r18_oracle/check/call.py", line 60 in attempted
  File "/r18_oracle/check/call.py", line 33 in observe
  File "/r18_oracle/search/worker.py", line 445 in _serve
  File "<string>", line 1 in <module>
"""
ARRANGED = """\
Main thread, most recent call first:
  File "/home/me/mine.py", line 7 in wait
  File ???, line ??? in ???
  File "C:\\me\\mine.py", line 39 in Network.run
  File "/r18_oracle/check/call.py", line 60 in attempted
  File "/r18_oracle/check/call.py", line 33 in observe
Thread 2, most recent call first:
  File "/usr/lib/python3/threading.py", line 359 in wait
  File "/home/me/mine.py", line 90 in watch
  ...
Thread 3, most recent call first:
  <no Python frame>"""
PLACE = (
    "; it stood in wait (mine.py:7), called by ??? (???:???), "
    "called by Network.run (mine.py:39), called by attempted (call.py:60)"
)


def hang(**changes: object) -> Finding:
    message = f"the worker process gave no sign of life for 9 s and was ended{PLACE}"
    details = {STACKS: ARRANGED, "silence_seconds": 9}
    found = Finding("hang", "toy", "toy/relu/it/fp32", problem(3), "normal", 1, message)
    return replace(found, **{"details": details, **changes})  # type: ignore[arg-type]


def test_the_main_thread_comes_first_and_a_workers_own_calls_are_left_out() -> None:
    assert stacks.arranged(WRITTEN) == ARRANGED
    assert stacks.place(ARRANGED) == PLACE
    taken = WRITTEN.replace("Current thread", "Thread").replace("Thread", "Current thread", 1)
    assert stacks.arranged(taken) == ARRANGED, "another thread took the signal"


def test_without_a_call_there_is_no_place() -> None:
    assert stacks.arranged("") == stacks.place("") == ""
    idle = "Current thread 0x0 (most recent call first):\n  <no Python frame>\n"
    assert stacks.arranged(idle) == ""
    waiting = WRITTEN.replace("line 7 in wait", "line seven")
    assert stacks.place(stacks.arranged(waiting)).startswith("; it stood in ??? (???:???), ")


@given(st.binary(max_size=200), st.integers(0, len(WRITTEN)))
def test_what_a_kernel_wrote_there_is_left_out(junk: bytes, at: int) -> None:
    """A kernel's output there is left out: only printable lines of `faulthandler` are kept."""
    spoiled = WRITTEN.encode()[:at] + junk + WRITTEN.encode()[at:]
    lines = stacks.arranged(spoiled.decode("utf-8", "replace")).split("\n")
    starts = ("Main thread, ", "Thread ", "  File ", "  ...", "...", "  <no Python frame>")
    assert lines == [""] or all(line.startswith(starts) for line in lines)
    assert "".join(lines).isprintable()


def test_many_threads_are_cut_off() -> None:
    many = "\n".join(WRITTEN.split("\n")[:4]) * 500 + WRITTEN
    text = stacks.arranged(many)
    assert text.startswith("Main thread, most recent call first:\n")
    assert len(text) == stacks.MOST_STACKS
    assert text.endswith("…")


@pytest.mark.skipif(stacks.SIGNAL is None, reason="no signal asks a process on Windows")
def test_an_answer_is_bounded_in_size_and_time(tmp_path: Path) -> None:
    """An answer is bounded, from a process with one long line and from one that never listened.

    NOTE: Not from this process. `faulthandler` reads the frames of all threads without the
    interpreter's lock, and those that thousands of tests leave behind have made it crash.
    """
    code = (
        "import sys, time; from r18_oracle import stacks; stacks.listen(sys.argv[1]); "
        "print(flush=True); time.sleep(600)"
    )
    asked = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert asked.stdout is not None
        assert asked.stdout.readline() == "\n"
        file = tmp_path / f"stacks-{asked.pid}"
        file.write_bytes(b"what a kernel wrote before")
        until = stacks.ask(str(tmp_path), asked.pid)
        began = time.monotonic()
        place = stacks.place(stacks.answer(str(tmp_path), asked.pid, until))
        assert place == "; it stood in <module> (<string>:1)"
        assert time.monotonic() < began + stacks.ANSWER_SECONDS
        file.write_bytes(b"x" * stacks.MOST_READ + WRITTEN.encode())
        assert stacks.answer(str(tmp_path), asked.pid, until) == ""
    finally:
        asked.kill()
        asked.communicate()
    deaf = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert stacks.ask(str(tmp_path), deaf.pid) <= time.monotonic(), "it does not listen"
        (tmp_path / f"stacks-{deaf.pid}").touch()
        until = stacks.ask(str(tmp_path), deaf.pid)
        assert stacks.answer(str(tmp_path), deaf.pid, until) == ""
        assert until <= time.monotonic() < until + 5
        assert deaf.poll() is None, "the signal ended it"
    finally:
        deaf.kill()
        deaf.wait()


@pytest.mark.skipif(stacks.SIGNAL is None, reason="no signal asks a process on Windows")
def test_a_listener_hears_what_its_parent_has_blocked(tmp_path: Path) -> None:
    """A listener, in its own process as it never stops, hears a signal its parent blocked."""
    code = (
        "import os, signal, sys; from r18_oracle import stacks; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, {stacks.SIGNAL}); stacks.listen(sys.argv[1]); "
        "until = stacks.ask(sys.argv[1], os.getpid()); "
        "print(stacks.place(stacks.answer(sys.argv[1], os.getpid(), until)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(
        r"; it stood in ask \(stacks\.py:\d+\), called by <module> \(<string>:1\)\n", done.stdout
    )
    assert done.stderr == ""


# -- in a finding ------------------------------------------------------------------------------


def test_a_finding_shows_the_first_lines_of_its_stacks(tmp_path: Path) -> None:
    described = hang().describe("f.json").split("\n")
    at = described.index("  stood     Main thread, most recent call first:")
    assert described[at + 1] == '              File "/home/me/mine.py", line 7 in wait'
    assert described[-2].strip() == "<no Python frame>"
    long = hang(details={STACKS: "\n".join([*ARRANGED.split("\n"), *("  ...",) * 30])})
    lines = long.describe().split("\n")
    lines = lines[lines.index(described[at]) :]
    assert len(lines) == 21
    assert lines[-1] == "            … 22 more lines"
    assert load(save(hang(), tmp_path)) == hang()


def test_a_file_cannot_make_a_finding_write_to_the_terminal(tmp_path: Path) -> None:
    assert "\x1b" not in hang(details={STACKS: "\x1b[2J\n\x1b]0;x"}).describe()
    path = tmp_path / "f.json"
    path.write_text(json.dumps(hang().to_json() | {"details": {STACKS: [1]}}), "utf-8")
    with pytest.raises(UsageError, match="stacks in its details: Expected `str`"):
        load(path)


def test_a_hang_at_another_place_is_the_same_finding() -> None:
    elsewhere = WRITTEN.replace("line 7 in wait", "line 8 in wait")
    place = stacks.place(stacks.arranged(elsewhere))
    other = hang(
        message=hang().message.replace(PLACE, place),
        details={STACKS: stacks.arranged(elsewhere), "silence_seconds": 9},
    )
    assert other != hang()
    assert other.same_as(hang())
    silent = hang(message=hang().message.replace(PLACE, ""), details={"silence_seconds": 9})
    assert silent.same_as(hang())
    assert not hang(message=hang().message.replace("9 s", "8 s")).same_as(hang())
    assert not silent.with_details({"silence_seconds": 8}).same_as(hang())


def test_a_finding_keeps_its_own_stacks_and_takes_other_details() -> None:
    fresh = hang(details={STACKS: "its own"})
    assert fresh.with_details(hang().details).details == {STACKS: "its own", "silence_seconds": 9}
    assert hang(details={}).with_details(hang().details).details == {"silence_seconds": 9}
