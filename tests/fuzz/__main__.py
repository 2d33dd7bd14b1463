"""`PYTHONPATH=tests python -m fuzz --minutes 60`: damaged files to every parser, for so long."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.runs import chunk
from fuzz.targets import TARGETS, Target

CHUNK = 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="*", default=[target.name for target in TARGETS])
    parser.add_argument("--out", type=Path, default=Path("exports/fuzz"), help="Files that fail.")
    asked = parser.parse_args()
    targets = [target for target in TARGETS if target.name in asked.targets]
    end = time.monotonic() + 60 * asked.minutes
    read: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    said: set[tuple[str, str]] = set()
    turn = 0
    with tempfile.TemporaryDirectory(prefix="r18-fuzz-") as name:
        while time.monotonic() < end:
            target = targets[turn % len(targets)]
            _one(
                target, f"{asked.seed} {turn // len(targets)}", Path(name), asked.out, failed, said
            )
            read[target.name] += CHUNK
            turn += 1
    for target in targets:
        print(f"{target.name:12} {read[target.name]:9,} files {failed[target.name]:6,} failed")
    print(f"{sum(read.values()):,} files, {sum(failed.values()):,} failed")
    return int(bool(failed))


def _one(
    target: Target,
    seed: str,
    folder: Path,
    out: Path,
    failed: Counter[str],
    said: set[tuple[str, str]],
) -> None:
    where = folder / target.name
    where.mkdir(exist_ok=True)
    for failure in chunk(target, seed, CHUNK, where):
        failed[target.name] += 1
        key = (target.name, failure.why[:60])
        if key in said:
            continue
        said.add(key)
        path = out / target.name / hashlib.sha256(failure.data).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(failure.data)
        print(f"{path}: {failure.why}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
