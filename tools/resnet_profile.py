"""Profile torchvision's ResNet-18 and the drop-in at each fusion level; the same as `r18 profile`.

python tools/resnet_profile.py --backend cupy --batch 1,8,64 [--precision fp16] [--trace FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import typer

from r18.bench.profile import BATCHES, LEVELS, PRECISIONS
from r18.cli.app import REFUSED
from r18.cli.profile import profile
from r18.errors import R18Error
from r18.weights import SOURCES


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Profile torchvision's ResNet-18 and the drop-in at each fusion level."
    )
    parser.add_argument("--backend", default="auto", help="a name of `r18 backends`")
    parser.add_argument(
        "--batch", default=",".join(map(str, BATCHES)), help="several separated by commas"
    )
    parser.add_argument(
        "--fusion", default=",".join(LEVELS), help="some levels, separated by commas"
    )
    parser.add_argument("--precision", default="fp32", choices=PRECISIONS)
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the best counts")
    parser.add_argument("--weights", default="synthetic", help=f"one of: {', '.join(SOURCES)}")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--trace", type=Path, help="a folder for Chrome traces")
    parser.add_argument("--check", action="store_true", help="judge every output")
    parser.add_argument("--record", action="store_true", help="write the device's record")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        profile(
            backend=args.backend,
            batch=args.batch,
            fusion=args.fusion,
            precision=args.precision,
            repeat=args.repeat,
            weights=args.weights,
            image_size=args.image_size,
            channels_last=args.channels_last,
            trace=args.trace,
            check=args.check,
            record=args.record,
            as_json=args.json,
        )
    except typer.Exit as ended:
        raise SystemExit(ended.exit_code) from None
    except R18Error as error:
        print(f"resnet_profile: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    main()
