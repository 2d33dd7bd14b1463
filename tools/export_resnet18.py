"""Export ResNet-18's weights with a manifest; `r18 export` has more options.

python tools/export_resnet18.py --out exports/resnet18/fp32 [--weights SOURCE] [--force]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r18.cli.app import REFUSED
from r18.cli.export import export
from r18.errors import R18Error
from r18.weights import SOURCES


def main() -> None:
    parser = argparse.ArgumentParser(description="Export ResNet-18's weights with a manifest.")
    parser.add_argument("--out", type=Path, default=Path("exports/resnet18/fp32"))
    parser.add_argument("--weights", default="imagenet", help=f"one of: {', '.join(SOURCES)}")
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    args = parser.parse_args()
    try:
        export(out=args.out, weights=args.weights, force=args.force)
    except R18Error as error:
        print(f"export_resnet18: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    main()
