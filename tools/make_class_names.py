"""Write imagenet_classes.json: torchvision's 1000 ImageNet class names in class order."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torchvision.models import ResNet18_Weights

HERE = Path(__file__).resolve().parent.parent / "r18" / "images" / "imagenet_classes.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="the file to write")
    out: Path = parser.parse_args().out
    names = ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    out.write_text(json.dumps(names, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    print(f"saved: {len(names)} class names -> {out.name}")


if __name__ == "__main__":
    main()
