"""Write the fixture of one step; `r18 fixtures` has more options.

python tools/make_step_fixture.py --manifest exports/resnet18/fp32 --step 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r18.cli.app import REFUSED
from r18.errors import R18Error
from r18.graph.resnet import NETWORKS
from r18_oracle.cli.fixtures import OUTDIR, fixtures


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the fixture of one step.")
    parser.add_argument("--manifest", type=Path, help="a folder that `r18 export` wrote")
    parser.add_argument("--weights", help="another source of weights (default: synthetic)")
    parser.add_argument("--outdir", type=Path, default=OUTDIR)
    parser.add_argument("--step", type=int, required=True, help="2 to 7")
    parser.add_argument("--network", default="resnet18", choices=list(NETWORKS))
    parser.add_argument("--force", action="store_true", help="replace an earlier fixture")
    args = parser.parse_args()
    try:
        fixtures(
            outdir=args.outdir,
            weights=args.weights,
            manifest=args.manifest,
            steps=str(args.step),
            network_name=args.network,
            force=args.force,
        )
    except R18Error as error:
        print(f"make_step_fixture: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None


if __name__ == "__main__":
    main()
