"""Count turns of phrase that our English avoids, per thousand lines of source and documents.

python tools/count_words.py [--limit RATE] [--worst N] [FILE | FOLDER ...]

By default it reads every .py, .cu and .cuh file outside tests, and every Markdown page. It prints
the count of each phrase and the worst files, and exits with 1 if the rate is above the limit.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("r18", "oracle", "backends", "tools", "docs")
SUFFIXES = {".py", ".cu", ".cuh", ".md"}
EXCEEDED = 1

PHRASES = (
    *("of which", "of what", "beside", "besides", "anew", "meanwhile", "so many"),
    *("lies", "lay", "told of", "nobody", "is asked", "is said"),
)

_GAP = r"(?:\s|#|//)+"  # a phrase may go on in the next line, behind a comment's sign
_PHRASE = re.compile(
    # Names of functions and attributes are code, not English.
    r"(?<![\w.`-])(" + "|".join(p.replace(" ", _GAP) for p in PHRASES) + r")(?![\w(=`-])",
    re.IGNORECASE,
)


def phrases_in(text: str) -> Counter[str]:
    """How often each phrase occurs in a text."""
    found = (re.sub(_GAP, " ", match).lower() for match in _PHRASE.findall(text))
    return Counter(found)


def files_in(paths: Iterable[Path]) -> Iterator[Path]:
    """The files to read: those given, and those in the folders given, without tests."""
    for path in paths:
        if path.is_file():
            yield path
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path).parts
            if file.suffix in SUFFIXES and not {"tests", "__pycache__"} & set(inside):
                yield file


def everything() -> list[Path]:
    """Our source and documents, without this list of phrases."""
    found = [*sorted(ROOT.glob("*.md")), *files_in(ROOT / folder for folder in FOLDERS)]
    return [path for path in found if path != Path(__file__).resolve()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count phrases per thousand lines.")
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: all")
    parser.add_argument("--limit", type=float, metavar="RATE", help="exit with 1 above this rate")
    parser.add_argument("--worst", type=int, default=20, metavar="N", help="files to list")
    parser.add_argument("--show", action="store_true", help="print each line that has a phrase")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    lines = 0
    ranked: list[tuple[int, int, str]] = []
    for path in files_in(args.paths) if args.paths else everything():
        text = path.read_text("utf-8")
        here, found = text.count("\n"), phrases_in(text)
        full = path.resolve()
        name = full.relative_to(ROOT).as_posix() if full.is_relative_to(ROOT) else str(path)
        lines += here
        total += found
        if found:
            ranked.append((found.total(), here, name))
        if args.show:
            for match in _PHRASE.finditer(text):
                number = text.count("\n", 0, match.start()) + 1
                print(f"{name}:{number}: {text.splitlines()[number - 1].strip()}")
    for phrase, count in total.most_common():
        print(f"{count:6}  {phrase}")
    if ranked:
        print("\n  found   lines  file")
    for count, here, name in sorted(ranked, reverse=True)[: args.worst]:
        print(f"{count:7} {here:7}  {name}")
    rate = 1e3 * total.total() / max(lines, 1)
    print(f"\n{total.total()} in {lines:,} lines: {rate:.2f} per thousand lines")
    if args.limit is not None and rate > args.limit:
        raise SystemExit(EXCEEDED)


if __name__ == "__main__":
    main()
