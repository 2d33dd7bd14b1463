"""Perturbed schedules: the kernels compiled with seeded delays, and delayed streams.

A race may need an order of events that a quiet device shows once in a million runs. `perturbed`
rewrites a source so that warps and CTAs, chosen by a seed, are delayed at its waits, arrivals,
barriers, fences, copies, products and launches, and so that TMA stores read shared memory as late
as they may. The result of a right kernel does not depend on any of this. The rewritten sources
exist only in memory: the kernels' own sources, and their digests, do not change.

A site is an inline-assembly statement or an intrinsic. Its kind follows from the instruction, so a
new wrapper needs no entry here. An instruction without a rule is an error.

NOTE: delays do not change what the hardware orders by itself. A missing proxy fence, a relaxed
arrival, or an arrival before `wgmma` has read its operands becomes no likelier; `r18 ptxcheck`
looks for the first two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from r18.errors import R18Error, UsageError, unknown

KINDS = ("wait", "arrive", "barrier", "fence", "copy", "store", "product", "launch", "host")
"""The kinds of site. `host`: a program's copies, runs and branches. The others are in kernels."""
MASKS = (3, 15)
"""One draw in `mask + 1` is a delay: seeds 0 and 1 have many, 2 and 3 few, and so on."""
NANOSECONDS = 8_000
"""The longest delay in a kernel; TMA brings a tile in about 1000."""
HEADER = "perturb.cuh"
PRELUDE = Path(__file__).with_name(HEADER)
SYMBOL = "r18_perturbation"
"""The module's variable that holds `Perturbation.words`."""


class SiteError(R18Error):
    """A source has an instruction without a rule, or a site that cannot be delayed."""


@dataclass(frozen=True)
class Perturbation:
    """The kinds of site that are delayed, and the seed that chooses the delays."""

    seed: int
    kinds: tuple[str, ...] = KINDS

    @classmethod
    def of(cls, seed: int, kinds: Collection[str] | None) -> Perturbation:
        """kinds: None for all. Raises `UnknownName` for an unknown kind, and `UsageError` for a
        seed that is not a 32-bit number."""
        for kind in kinds or ():
            if kind not in KINDS:
                raise unknown("kind of site", kind, KINDS)
        if not 0 <= seed < 1 << 32:
            raise UsageError(f"a seed of delays is a number from 0 to 2³² − 1, got {seed}")
        return cls(seed, KINDS if kinds is None else tuple(k for k in KINDS if k in kinds))

    @property
    def words(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """The fields of the device's `Perturbation`."""
        bits = sum(1 << KINDS.index(kind) for kind in self.kinds)
        mask = MASKS[self.seed // 2 % len(MASKS)]
        return np.array([self.seed, bits, mask, NANOSECONDS], np.uint32)

    def delays_host(self, turn: int) -> bool:
        """Whether the host's copy, run or branch number `turn` is delayed: half of them are."""
        drawn = hashlib.sha256(f"{self.seed} {turn}".encode()).digest()
        return "host" in self.kinds and drawn[0] % 2 == 0


# -- sites -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The kind of an instruction's sites, and whether threads are delayed before and after it."""

    kind: str
    before: bool
    after: bool


# By the beginning of the instruction; the first match decides. None: no delay.
INSTRUCTIONS: dict[str, Rule | None] = {
    "mbarrier.try_wait": Rule("wait", False, True),  # in a loop: a delay before it only adds polls
    "mbarrier.arrive": Rule("arrive", True, True),
    "mbarrier.init": Rule("fence", True, False),
    "fence.mbarrier_init": Rule("fence", True, False),
    "fence.proxy": Rule("fence", True, False),
    "barrier.cluster.arrive": Rule("arrive", True, True),
    "barrier.cluster.wait": Rule("wait", True, True),
    "bar.sync": Rule("barrier", True, True),
    "griddepcontrol": Rule("launch", True, True),
    "cp.async.wait_group": Rule("wait", True, True),
    "cp.async.bulk.wait_group": Rule("wait", True, True),
    "cp.async.bulk.tensor": Rule("copy", True, False),
    "cp.async.bulk.shared": Rule("copy", True, False),
    "cp.async.ca": Rule("copy", True, False),
    "cp.async.cg": Rule("copy", True, False),
    "ld.shared::cluster": Rule("copy", True, False),
    "st.async": Rule("copy", True, False),
    "wgmma.fence": Rule("product", True, False),
    "wgmma.wait_group": Rule("product", False, True),
    # The others order nothing by themselves, or are in the middle of a sequence of products.
    "cp.async.commit_group": None,
    "cp.async.bulk.commit_group": None,
    "wgmma.mma_async": None,
    "wgmma.commit_group": None,
    "setmaxnreg": None,
    "prefetch.tensormap": None,
    "ld.global.": None,
    "ld.shared.": None,
    "st.shared.": None,
    "ldmatrix": None,
    "stmatrix": None,
    "mma.sync": None,
    "dp4a": None,
    "mapa": None,
    "elect": None,
    "mov": None,
    "cvt": None,
    "max.": None,
    "selp": None,
    "setp": None,
}
BULK_STORE = re.compile(r"cp\.async\.bulk\.tensor\.[2-4]d\.global\.shared")
ALIGNED = re.compile(r"bar\.sync|__syncthreads|\S*\.aligned\b")
"""Instructions that all lanes of a warp execute together."""
INTRINSICS: dict[str, Rule | None] = {
    "__syncthreads": Rule("barrier", True, True),
    "__syncwarp": Rule("barrier", True, True),
}
_SYNCHRONISES = re.compile(
    r"\b(?:__\w*(?:sync|fence|barrier)\w*|atomic\w*|__nanosleep|cooperative_groups|cuda)\b(?=\(|::)"
)
_CALM = re.compile(r"__shfl\w*_sync|__(?:all|any|ballot|match\w*|reduce\w*)_sync")
"""Exchanges of values within a warp; they wait for lanes, not for memory."""


@dataclass(frozen=True)
class Site:
    """A statement of a source where threads may be delayed.

    start, end: its span of characters, with the semicolon. number: its index among the file's
    sites. operands: those of a bulk store, as written.
    """

    file: str
    number: int
    start: int
    end: int
    instruction: str
    rule: Rule
    operands: tuple[str, ...] = ()

    def draw(self, side: str) -> str:
        """The arguments that name the site: its kind and a number of its own."""
        number = crc32(f"{self.file}:{self.number}:{side}".encode())
        return f"{KINDS.index(self.rule.kind)}, {number}u"


def sites(text: str, file: str) -> tuple[Site, ...]:
    """Every site of a source, in order. Raises `SiteError`.

    file: its path below the kernels, for the sites' numbers and for errors.
    """
    return tuple(_sites(text, file))


def perturbed(text: str, file: str) -> str:
    """The source with a delay at each site. Lines keep their numbers."""
    parts, end = [], 0
    for site in sites(text, file):
        parts += [text[end : site.start], _delayed(site, text[site.start : site.end])]
        end = site.end
    if not parts:
        return text
    return f'#include "{HEADER}"\n#line 1\n' + "".join([*parts, text[end:]])


@lru_cache(maxsize=2)
def perturbed_sources(kernels: Path) -> dict[str, str]:
    """Every perturbed source below a folder by its path, and the header that they include."""
    files = sorted(path for path in kernels.rglob("*") if path.suffix in (".cu", ".cuh"))
    names = [path.relative_to(kernels).as_posix() for path in files]
    texts = {n: perturbed(p.read_text("utf-8"), n) for n, p in zip(names, files, strict=True)}
    return {**texts, HEADER: PRELUDE.read_text("utf-8")}


def _sites(text: str, file: str) -> Iterator[Site]:
    code, bare = _without_comments(text), _without_comments(text, strings=True)
    number = 0
    pattern = re.compile(rf"\basm\b|{'|'.join(map(re.escape, INTRINSICS))}|{_SYNCHRONISES.pattern}")
    for found in pattern.finditer(bare):
        word = found[0]
        if _CALM.fullmatch(word):
            continue
        opening = bare.find("(", found.end())
        line = text.count("\n", 0, found.start()) + 1
        if word != "asm" and word not in INTRINSICS:
            raise SiteError(
                f"kernels/{file}:{line}: '{word}' has no rule\n"
                "  add one to r18_cupy/cuda/perturb.py, or None if the instruction orders nothing"
            )
        closing = _closing(bare, opening)
        end = closing + 1
        if bare[end : end + 1] != ";":
            raise SiteError(f"kernels/{file}:{line}: '{word}' is not a statement of its own")
        if word == "asm":
            instruction, rule = _instruction(code[opening + 1 : closing], f"{file}:{line}")
        else:
            instruction, rule = word, INTRINSICS[word]
        if rule is None:
            continue
        operands: tuple[str, ...] = ()
        if BULK_STORE.match(instruction):
            operands = tuple(re.findall(r'"[lr]"\s*\(\s*([^()]*?)\s*\)', code[opening:closing]))
            rule = Rule("store", True, False)
        yield Site(file, number, found.start(), end + 1, instruction, rule, operands)
        number += 1


def _instruction(content: str, where: str) -> tuple[str, Rule | None]:
    """The instruction of an asm statement that is delayed, with its rule, or else its first one."""
    template = re.match(r'(?:[^":]|"(?:[^"\\]|\\.)*")*', content)
    assert template is not None
    text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template[0])).replace("\\n", "\n")
    found = [part.strip(" {}\t") for part in re.split(r"[;\n]", text)]
    names = [name for name in found if name and not name.startswith(".reg")]
    rules: list[tuple[str, Rule | None]] = []
    for name in names:
        known = next((start for start in INSTRUCTIONS if name.startswith(start)), None)
        if known is None:
            if rules and not re.match(r"[a-z]\w*[. ]", name):
                continue  # operands of a template that is pasted together
            raise SiteError(
                f"kernels/{where}: the instruction '{name.split()[0]}' has no rule\n"
                "  add one to r18_cupy/cuda/perturb.py, or None if the instruction orders nothing"
            )
        rules.append((name, INSTRUCTIONS[known]))
    timed = [one for one in rules if one[1] is not None]
    if len(timed) > 1:
        raise SiteError(f"kernels/{where}: several synchronising instructions in one asm")
    return (timed or rules or [("", None)])[0]


def _delayed(site: Site, statement: str) -> str:
    """The statement with its delays, as one statement on the same lines."""
    before = f"r18_delay({site.draw('before')}); " if site.rule.before else ""
    after = f" r18_delay({site.draw('after')});" if site.rule.after else ""
    if ALIGNED.match(site.instruction):
        # A lane that slept in a branch of its own may still be asleep: the others do not wait for
        # it where the branch ends, although the compiler relies on that.
        before = f"{before}__syncwarp(); "
    if site.rule.kind == "store":
        tensor_map, *coordinates, source = site.operands
        places = ", ".join((*coordinates, "0", "0")[:4])
        where = f"{len(coordinates)}, {tensor_map}, {places}, {source}"
        return (
            f"{{ if (!r18_postpone({site.draw('postponed')}, {where})) {{ {before}{statement} }} }}"
        )
    if site.instruction.startswith("mbarrier.init"):
        before = f"r18_postpone_none(); {before}"
    if site.instruction.startswith("cp.async.bulk.wait_group"):
        before = f"{before}r18_store_postponed(); "
    return f"{{ {before}{statement}{after} }}"


def _without_comments(text: str, *, strings: bool = False) -> str:
    """The text with comments, and strings if `strings`, replaced by blanks of the same length."""

    def blank(found: re.Match[str]) -> str:
        if found[0][0] == '"' and not strings:
            return found[0]
        return re.sub(r"[^\n]", " ", found[0])

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', blank, text, flags=re.DOTALL)


def _closing(text: str, opening: int) -> int:
    """The bracket that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)
