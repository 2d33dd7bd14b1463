"""Make the tables of kernels in docs/backends from what the backends declare; `--check` only
reports differences.

python tools/make_kernel_tables.py [--check] [FILE ...]

Each table is between two markers. The first names a backend as in `load_backend`:

    <!-- kernels: numpy -->
    <!-- /kernels -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from r18.atomic import write_text
from r18.backend import Kernel, RoundingContract
from r18.backend.registry import load_backend
from r18.cli.app import FOUND, REFUSED
from r18.errors import R18Error
from r18.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
HEADS = "op | algorithm | kernels | precisions | layouts | bound | promises"

_BLOCK = re.compile(
    r"^(?P<head><!-- kernels: (?P<backend>\S+) -->\n)(?P<body>.*?)^(?P<foot><!-- /kernels -->)$",
    re.MULTILINE | re.DOTALL,
)


def rendered(text: str) -> str:
    """The document with current tables. Raises what `load_backend` raises."""
    return _BLOCK.sub(
        lambda block: f"{block['head']}\n{table(block['backend']).markdown()}\n{block['foot']}",
        text,
    )


def table(name: str) -> Table:
    """A line for each op and algorithm, in the backend's order."""
    kernels = load_backend(name).kernels()
    families: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        families.setdefault((kernel.op.name, kernel.algorithm), []).append(kernel)
    rows = [row(op, algorithm, members) for (op, algorithm), members in families.items()]
    caption = f"{len(kernels)} kernels, as `r18 kernels --backend {name} --arch none` lists them."
    return Table(HEADS, "llrllll", rows, [caption])


def row(op: str, algorithm: str, members: Sequence[Kernel]) -> tuple[str, ...]:
    """The table's row for the kernels of an op and algorithm; "some" marks promises that not all
    make."""
    return (
        op,
        algorithm,
        str(len(members)),
        _each(kernel.precision.name for kernel in members),
        _each(kernel.layout.name for kernel in members),
        _each(bound(kernel.contract) for kernel in members),
        ", ".join(
            promise if all(kept) else f"some {promise}"
            for promise, kept in (
                ("deterministic", [kernel.deterministic for kernel in members]),
                ("batch-invariant", [kernel.batch_invariant for kernel in members]),
                ("in place", [kernel.in_place for kernel in members]),
            )
            if any(kept)
        ),
    )


def _each(words: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(words))


def bound(contract: RoundingContract) -> str:
    """The derivation of the bound, and what else in the contract affects it."""
    return (
        contract.algorithm
        + (", cut off" if contract.truncates else "")
        + (f", {contract.blocks} blocks" if contract.blocks > 1 else "")
        + (", stored sum" if contract.stored_sum else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a document's tables of kernels.")
    pages = sorted((ROOT / "docs" / "backends").rglob("*.md"))
    parser.add_argument("files", nargs="*", type=Path, default=pages)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args()
    stale = False
    try:
        for path in args.files:
            old = path.read_text("utf-8")
            new = rendered(old)
            print(f"{path.name}: {'as the backends say' if old == new else 'differs'}")
            stale = stale or old != new
            if old != new and not args.check:
                write_text(path, new)
    except (R18Error, OSError) as error:
        print(f"make_kernel_tables: {error}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    if args.check and stale:
        raise SystemExit(FOUND)


if __name__ == "__main__":
    main()
