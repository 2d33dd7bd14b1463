"""Make the documents' tables from exports/records; `--check` only reports differences.

python tools/make_tables.py [--check] [FILE ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from r18.atomic import write_text
from r18.cli.app import FOUND, REFUSED
from r18.errors import R18Error
from r18.records import FOLDER
from r18.report.tables import rendered

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a document's tables from the records.")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    parser.add_argument("files", nargs="*", type=Path, default=pages)
    parser.add_argument("--records", type=Path, default=ROOT / FOLDER, help="their folder")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args()
    stale = False
    try:
        for path in args.files:
            old = path.read_text("utf-8")
            new = rendered(old, args.records)
            within = path.resolve().is_relative_to(ROOT)
            name = path.resolve().relative_to(ROOT) if within else path.name
            print(f"{name}: {'as the records say' if old == new else 'differs'}")
            stale = stale or old != new
            if old != new and not args.check:
                write_text(path, new)
    except (R18Error, OSError) as error:
        print(f"make_tables: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    if args.check and stale:
        raise SystemExit(FOUND)


if __name__ == "__main__":
    main()
