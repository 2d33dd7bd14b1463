"""Run `r18 check` on kernels of other libraries: the functions of tests/foreign.

    python tools/check_foreign.py [FILE[:FUNCTION] ...] [--record] [--profile PROFILE]

Each function is checked by a command of its own, so that no library meets another's state. A file
whose library is not installed, or whose device is not there, is skipped by name. With `--record`
the results become exports/records/check-<device>.json, from which docs/check.md has its table.

Some faults are of code for a CPU's instructions (`FAULTS_WITH`): on a CPU without them the function
has to be right, and the record keeps what a CPU with them showed.

Exit codes: 0 all right, or wrong for a reason that the file declares (`FAULTS`); 1 a function is
wrong without a reason, or right in spite of one; 2 a wrong request or nothing was run.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from r18 import records
from r18.backend import DeviceInfo
from r18.cli.app import FOUND, REFUSED
from r18.cpu import cpu
from r18.errors import BackendUnavailable, R18Error, UsageError, unknown
from r18.machine import machine, package_version
from r18.records.kinds import Check, CheckedFunction, CheckRun, Machine
from r18_oracle.checked import NETWORK
from r18_oracle.functions.kinds import arrays_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "foreign"
LIMIT_SECONDS = 600
"""The time limit of a function; one that takes longer ends the run."""


class Skipped(Exception):
    """A file whose functions cannot run here; says why."""


@dataclass(frozen=True)
class Foreign:
    """A file of functions, as it is written; none of it is imported here.

    library: its name for people. needs: the modules that it imports, the library's first.
    functions: the kind of arrays of each. faults: why some are wrong. faults_with: the instructions
    (`r18.cpu.INSTRUCTIONS`) that some faults need.
    """

    path: Path
    library: str
    needs: tuple[str, ...]
    functions: dict[str, str]
    faults: dict[str, str] = field(default_factory=dict)
    faults_with: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Foreign:
        """Read a file's declarations. Raises `UsageError` for a file that declares too little."""
        constants: dict[str, Any] = {}
        functions: dict[str, str] = {}
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign):
                constants |= _constants(node)
            elif isinstance(node, ast.FunctionDef):
                marks = (one for one in node.decorator_list if isinstance(one, ast.Call))
                for mark in marks:
                    if ast.unparse(mark.func) == "r18.check.kernel":
                        given = {word.arg: word.value for word in mark.keywords}
                        functions[node.name] = ast.literal_eval(given["arrays"])
        try:
            faults = constants.get("FAULTS", {})
            needs, faults_with = constants["NEEDS"], constants.get("FAULTS_WITH", {})
            found = cls(path, constants["LIBRARY"], needs, functions, faults, faults_with)
        except KeyError as error:
            raise UsageError(f"{path} declares no {error}") from None
        for name in found.faults:
            if name not in functions:
                raise unknown(f"function of {path.name} in FAULTS", name, functions)
        for name in found.faults_with:
            if name not in found.faults:
                raise unknown(f"fault of {path.name} in FAULTS_WITH", name, found.faults)
        return found

    def lacking(self, name: str) -> str:
        """The instructions that a function's fault needs, if this CPU has none; else ""."""
        needed = self.faults_with.get(name, "")
        return "" if needed in cpu().instructions else needed

    def device(self) -> DeviceInfo:
        """Where its functions run. Raises `Skipped` where they do not."""
        for name in self.needs:
            if find_spec(name) is None:
                raise Skipped(f"{self.library}: {name} is not installed")
        try:
            (device,) = {
                found.slug: found for found in map(_device, self.functions.values())
            }.values()
        except BackendUnavailable as error:
            raise Skipped(f"{self.library}: {error.cause}") from None
        return device

    @property
    def version(self) -> str:
        (name, *_) = packages_distributions()[self.needs[0]]
        return f"{self.library} {package_version(name)}"


def _constants(node: ast.Assign) -> dict[str, Any]:
    """The names that an assignment gives to constants."""
    try:
        value = ast.literal_eval(node.value)
    except ValueError:
        return {}
    (target,) = node.targets
    if isinstance(target, ast.Tuple):
        return dict(zip((ast.unparse(name) for name in target.elts), value, strict=True))
    return {ast.unparse(target): value}


def _device(arrays: str) -> DeviceInfo:
    """The device of a function's arrays; for a CPU without the version of the arrays' library."""
    found = arrays_of(arrays).device()
    return DeviceInfo("cpu", cpu().name) if found.kind == "cpu" else found


def asked(names: list[str]) -> Iterator[tuple[Foreign, list[str]]]:
    """The files, and the functions of each. Raises `UsageError`, `UnknownName`."""
    paths = {path.name: path for path in sorted(FOLDER.glob("*_*.py")) if path.stem[:5] != "test_"}
    for name in names or paths:
        file, _, function = name.partition(":")
        if file not in paths:
            raise unknown("file of tests/foreign", file, paths, error=UsageError)
        found = Foreign.of(paths[file])
        if function and function not in found.functions:
            raise unknown(f"function of {file}", function, found.functions, error=UsageError)
        yield found, [function] if function else list(found.functions)


def checked(path: Path, name: str, profile: str) -> tuple[dict[str, Any], float]:
    """The output of `r18 check --json` for a function, and the seconds of the command.

    Raises `R18Error` with what it printed instead.
    """
    where = path.relative_to(ROOT)
    command = [sys.executable, "-m", "r18", "check", f"{where}:{name}", "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--profile", profile],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    seconds = time.perf_counter() - start
    if done.returncode not in (0, FOUND):
        raise R18Error(f"r18 check {where}:{name} exited with {done.returncode}: {done.stderr}")
    (result,) = json.loads(done.stdout)
    return result, seconds


def entry(run: str, library: str, fault: str, result: dict[str, Any], seconds: float) -> Any:
    """A result as an entry of the record."""
    taken = ("dtype", "arrays", "contract", "found", "words", "below", "notes", "verdict", "ok")
    counted = ("problems", "refused", "checks", "error_over_bound", "reduced", "findings")
    return msgspec.convert(
        {name: result[name] for name in (*taken, *counted)}
        | {
            "run": run,
            "date": records.now(),
            "library": library,
            "operator": result["like"],
            "fault": fault,
            "seconds": round(seconds, 1),
        },
        CheckedFunction,
    )


def keep(folder: Path, device: DeviceInfo, run: CheckRun, made: dict[str, CheckedFunction]) -> Path:
    """Add a file's results to the record of its device; others stay."""

    def change(old: Check | None) -> Check:
        functions = ({} if old is None else old.functions) | made
        runs = ({} if old is None else old.runs) | {_key(run): run}
        used = {one.run for one in functions.values()}
        runs = {key: one for key, one in runs.items() if key in used}
        return Check(device=device.name, runs=runs, functions=dict(sorted(functions.items())))

    path = records.path_of(folder, "check", device)
    records.update(path, Check, change)
    return path


def _key(run: CheckRun) -> str:
    """The key of all settings; of the machine only the CPU counts, since its load changes."""
    plain = msgspec.to_builtins(run)
    return records.key_of({**plain, "machine": plain["machine"].get("cpu")})


def main() -> None:
    parser = argparse.ArgumentParser(description="Run r18 check on other libraries' kernels.")
    parser.add_argument("names", nargs="*", metavar="FILE[:FUNCTION]", help="[all of the folder]")
    parser.add_argument("--record", action="store_true", help="keep the results")
    parser.add_argument("--records", type=Path, default=ROOT / records.FOLDER, help="their folder")
    parser.add_argument("--profile", default="quick", help="effort, as of r18 check")
    args = parser.parse_args()
    judged = unexpected = 0
    try:
        for file, names in asked(args.names):
            try:
                device, version = file.device(), file.version
            except Skipped as why:
                print(f"{file.path.name}: skipped: {why}", flush=True)
                continue
            where = msgspec.convert(records.environment(device), records.Environment)
            here = msgspec.convert(machine(), Machine)
            run = CheckRun(args.profile, NETWORK, 0, where, here)
            for name in names:
                lacking = file.lacking(name)
                fault = "" if lacking else file.faults.get(name, "")
                result, seconds = checked(file.path, name, args.profile)
                one = entry(_key(run), version, fault, result, seconds)
                judged += 1
                right = one.ok is not bool(fault)
                unexpected += not right
                said = "" if right else ", right in spite of FAULTS" if one.ok else ", unexplained"
                key = f"{file.path.stem}/{name}"
                print(f"{key}: {one.words}: {one.verdict}{said}, {seconds:.0f} s", flush=True)
                if lacking:
                    print(f"{key}: not recorded: its fault needs {lacking}", flush=True)
                elif args.record:
                    keep(args.records, device, run, {key: one})
    except (R18Error, OSError, subprocess.SubprocessError) as error:
        print(f"check_foreign: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    if not judged:
        print("check_foreign: nothing was run", file=sys.stderr)
        raise SystemExit(REFUSED)
    if unexpected:
        raise SystemExit(FOUND)


if __name__ == "__main__":
    main()
