"""Compare two dumps, checkpoint by checkpoint; the same as `r18 diff`.

python tools/diag_e2e_compare.py --torch_dir exports/e2e --cuda_dir exports/dump
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r18.cli.app import FOUND, REFUSED
from r18.errors import R18Error
from r18_oracle.dumps.dumps import diff_dumps


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two dumps, checkpoint by checkpoint.")
    parser.add_argument("--torch_dir", type=Path, required=True, help="the dump taken to be right")
    parser.add_argument(
        "--cuda_dir",
        "--dump_dir",
        type=Path,
        required=True,
        help="the dump or raw files to judge",
    )
    parser.add_argument("--atol", type=float, default=1e-4)
    parser.add_argument("--allow-different-input", action="store_true")
    args = parser.parse_args()
    try:
        report = diff_dumps(
            args.torch_dir,
            args.cuda_dir,
            atol=args.atol,
            allow_different_input=args.allow_different_input,
        )
    except R18Error as error:
        print(f"diag_e2e_compare: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    print(report.text())
    if not report.ok:
        raise SystemExit(FOUND)


if __name__ == "__main__":
    main()
