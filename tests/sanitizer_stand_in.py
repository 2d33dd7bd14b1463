"""Stands in for compute-sanitizer: runs the command it is given, and writes the log it is told to.

Beside the script lies `script.json`: by tool, for each process in turn, the log's text, the exit
code in place of the command's, and whether the command runs at all; or one turn for all processes,
whose log may be told by a kernel that it is asked to run (`guilty`) and one that it is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print("NVIDIA (R) Compute Sanitizer\nVersion 2025.3.1.0 (build 1)")
        return 0
    here = Path(sys.argv[0]).parent
    told = {"pool": os.environ["R18_CUPY_POOL"], "path": os.environ.get("PYTHONPATH", "")}
    with (here / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps({"arguments": arguments, **told}) + "\n")
    tool = arguments[arguments.index("--tool") + 1]
    script = json.loads((here / "script.json").read_text())
    turn = script[tool]
    if isinstance(turn, list):
        turn = turn.pop(0)
        (here / "script.json").write_text(json.dumps(script))
    text = turn["log"]
    if "guilty" in turn and turn["guilty"] not in json.loads(arguments[-1])["kernels"]:
        text = turn["else"]
    log = arguments[arguments.index("--log-file") + 1].replace("%p", str(os.getpid()))
    if text is not None:
        Path(log).write_text(text)
    time.sleep(turn.get("sleep", 0))
    code = 0
    if turn.get("run", True):
        code = subprocess.run(arguments[arguments.index(sys.executable) :], check=False).returncode
    return int(turn.get("code", code))


if __name__ == "__main__":
    sys.exit(main())
