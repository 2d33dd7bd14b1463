"""A stand-in for compute-sanitizer: runs the given command, and writes the log from its script.

`script.json` next to it has, by tool and for each process in turn, the log's text, the exit
code in place of the command's, and what to do with the command: `run` it, which takes seconds;
`play` it, that is, print what it would print of kernels that all succeed; or `nothing`. One turn
may stand for all processes; its log may depend on a kernel in the command (`guilty`).
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
    variables = {"pool": os.environ["R18_CUPY_POOL"], "path": os.environ.get("PYTHONPATH", "")}
    with (here / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps({"arguments": arguments, **variables}) + "\n")
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
    command = turn.get("command", "play")
    if command == "run":
        code = subprocess.run(arguments[arguments.index(sys.executable) :], check=False).returncode
    elif command == "play":
        for kernel in json.loads(arguments[-1])["kernels"]:
            print(json.dumps({"begins": kernel}))
            print(json.dumps({"ends": kernel, "problems": 25}))
    return int(turn.get("code", code))


if __name__ == "__main__":
    sys.exit(main())
