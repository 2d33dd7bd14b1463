"""Write the end-to-end fixtures: an input and every canonical checkpoint, computed in float64.

python tools/make_e2e_fixtures.py --manifest exports/resnet18/fp32 --image PHOTO
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r18.cli.app import REFUSED
from r18.errors import R18Error
from r18.graph.resnet import NETWORKS, network
from r18.weights import load_weights
from r18_oracle.cli.fixtures import weights_source
from r18_oracle.dumps.fixtures import make_e2e
from r18_oracle.network.images import chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write an input and every canonical checkpoint, computed in float64."
    )
    parser.add_argument("--manifest", type=Path, help="a folder that `r18 export` wrote")
    parser.add_argument("--weights", help="another source of weights (default: synthetic)")
    parser.add_argument("--outdir", type=Path, default=Path("exports/e2e"))
    parser.add_argument("--image", type=Path, action="append", help="repeat it for a batch")
    parser.add_argument("--network", default="resnet18", choices=list(NETWORKS))
    parser.add_argument("--force", action="store_true", help="replace earlier fixtures")
    args = parser.parse_args()
    try:
        schedule = network(args.network)
        source = weights_source(args.weights, args.manifest) or "synthetic"
        weights = load_weights(source, schedule)
        images = chosen(schedule, weights.preprocess, files=args.image or ())
        made = make_e2e(args.outdir, schedule, weights, images, overwrite=args.force)
    except R18Error as error:
        print(f"make_e2e_fixtures: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    for file in made.checkpoints:
        print(f"saved: {file.name} {list(file.shape)} -> {args.outdir / file.path}")


if __name__ == "__main__":
    main()
