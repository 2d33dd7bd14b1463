"""Time a backend's whole network next to torchvision's module; `r18 bench` has more options.

python tools/bench_vs_torch_e2e.py --backend numpy --batch 1,8 [--manifest exports/resnet18/fp32]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r18.cli.app import REFUSED
from r18.cli.bench import bench
from r18.errors import R18Error
from r18.weights import SOURCES


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time a backend's whole network next to torchvision's module."
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--weights", default="synthetic", help=f"one of: {', '.join(SOURCES)}")
    source.add_argument("--manifest", type=Path, help="an exported folder or its manifest.json")
    parser.add_argument("--backend", default="auto", help="one or more, separated by commas")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", default="1", help="one or more, separated by commas")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    weights = args.weights
    if args.manifest is not None:
        folder = args.manifest.parent if args.manifest.name == "manifest.json" else args.manifest
        weights = str(folder)
    try:
        bench(
            backends=args.backend,
            precision=args.precision,
            batch=args.batch,
            warmup=args.warmup,
            repeat=args.repeat,
            weights=weights,
            as_json=args.json,
        )
    except R18Error as error:
        print(f"bench_vs_torch_e2e: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    main()
