"""Run `PYTHONPATH=tests python -m fuzz --minutes 60` to read damaged files with every parser."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path


def main() -> int:
    # Before NumPy and PyTorch are imported: a process that reads files needs one thread, and one
    # with several should not fork.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    from fuzz.campaign import CHUNK, campaign, missing
    from fuzz.targets import TARGETS

    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--files", type=int, help="Stop after this number of files, or when the time is up."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="That read files side by side.")
    parser.add_argument("--targets", nargs="*", default=names, choices=names)
    parser.add_argument("--out", type=Path, default=Path("exports/fuzz"), help="Files that fail.")
    asked = parser.parse_args()
    targets = [target for target in TARGETS if target.name in asked.targets]
    lacking = {target.name: missing(target) for target in targets}
    able = [target for target in targets if not lacking[target.name]]
    if not able or asked.processes < 1:
        parser.error("there is no parser, or no process, to run")
    most = 1 << 62 if asked.files is None else -(-asked.files // CHUNK) * CHUNK
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no folder stays behind
    begin = time.monotonic()
    tally = campaign(
        able,
        asked.seed,
        asked.out,
        processes=asked.processes,
        seconds=60 * asked.minutes,
        most=most,
    )
    took = time.monotonic() - begin
    for target in targets:
        if lacking[target.name]:
            print(f"{target.name:18} skipped: {', '.join(lacking[target.name])} is not installed")
        else:
            files, failed = tally.files[target.name], tally.failed[target.name]
            print(f"{target.name:18} {files:9,} files {failed:6,} failed")
    total = tally.files.total()
    print(
        f"{total:,} files, {tally.failed.total():,} failed, in {took:.0f} s: {total / took:,.0f} "
        f"files a second by {asked.processes} processes"
    )
    if tally.lost:
        print(f"{tally.lost} processes died")
    return int(not tally.sound)


if __name__ == "__main__":
    raise SystemExit(main())
