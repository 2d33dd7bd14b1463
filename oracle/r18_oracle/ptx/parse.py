"""Parses PTX into instructions and a control-flow graph for each entry function.

Reads what NVRTC and Numba write: one instruction or label per line, calls already inlined. Grammar:
PTX ISA 9.0, sections 4 ("Syntax") and 9.2 ("Instructions"). Types, alignment and values do not
matter here and are not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from r18.errors import R18Error

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_PARAMETER = re.compile(r"\.param\b[^,)]*?([\w$]+)(?:\[\d*\])?\s*(?=[,)]|$)")
_LABEL = re.compile(r"([$%\w]+):(?!:)\s*")
_STATEMENT = re.compile(r"^(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_NAME = re.compile(r"[%$_a-zA-Z][\w$]*")
_ENDS = ("ret", "exit", "trap")
_SYNCHRONISES = ("fence", "membar", "bar", "barrier", "mbarrier", "griddepcontrol")
_ACCESSES = ("st", "ld", "red", "atom", "stmatrix", "cp", "wgmma")
_ORDERING = frozenset((*_ACCESSES, *_SYNCHRONISES, *_ENDS))


class PtxError(R18Error):
    """PTX that this parser does not understand; it skips nothing silently."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    opcode:   with its modifiers: `st.shared.v4.f32`.
    operands: the text after it, without the semicolon.
    guard:    the predicate's register, or "" if the instruction always executes.
    line:     its line in the PTX, from 1.
    """

    opcode: str
    operands: str
    guard: str
    line: int

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".strip()

    def starts(self, *prefixes: str) -> bool:
        """Whether the opcode is one of these, or one of them with more modifiers."""
        return any(self.opcode == p or self.opcode.startswith(p + ".") for p in prefixes)

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """The register or symbol at the beginning of each pair of brackets."""
        return tuple(re.findall(r"\[\s*([%$\w]+)", self.operands))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All registers and symbols of the operands, in order."""
        return tuple(_NAME.findall(self.operands))

    @cached_property
    def written(self) -> str:
        """The first register, which an instruction with a result writes; "" without operands."""
        return self.names[0] if self.names else ""


@dataclass
class Block:
    """A basic block: instructions without a branch between them, and the blocks that may follow."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Function:
    """A kernel: its name, the names of its parameters, and its blocks; the first is the entry."""

    name: str
    parameters: tuple[str, ...]
    blocks: tuple[Block, ...]

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(i for block in self.blocks for i in block.instructions)

    @cached_property
    def every(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions of each block."""
        return tuple(tuple(block.instructions) for block in self.blocks)

    @cached_property
    def ordering(self) -> tuple[tuple[Instruction, ...], ...]:
        """For each block, the instructions that access memory, synchronise or end the thread."""
        return tuple(
            tuple(i for i in block.instructions if i.opcode.partition(".")[0] in _ORDERING)
            for block in self.blocks
        )

    def loop(self, block: int) -> frozenset[int]:
        """The blocks of all loops around a block; empty outside loops."""
        around = self.reachable[block]
        return frozenset(other for other in around if block in self.reachable[other])

    def earlier(self, block: int) -> frozenset[int]:
        """The blocks of the loops around a block that may come before it in the same iteration."""
        loop = self.loop(block)
        outside = [i for i in range(len(self.blocks)) if i not in loop]
        heads = {s for i in outside for s in self.blocks[i].successors if s in loop}
        found: set[int] = set()
        todo = [block]
        while todo:
            at = todo.pop()
            if at in heads:
                continue  # earlier blocks belong to another iteration
            more = {i for i in loop if at in self.blocks[i].successors} - found
            found |= more
            todo += more
        return frozenset(found)

    @cached_property
    def reachable(self) -> tuple[frozenset[int], ...]:
        """For each block, the blocks that a thread may enter after leaving it."""
        found = []
        for block in self.blocks:
            seen: set[int] = set()
            todo = list(block.successors)
            while todo:
                at = todo.pop()
                if at not in seen:
                    seen.add(at)
                    todo += self.blocks[at].successors
            found.append(frozenset(seen))
        return tuple(found)


def functions(ptx: str) -> tuple[Function, ...]:
    """The entry functions of a PTX module, in its order.

    Raises `PtxError` for a module without one, for a call (data would flow unseen), an indirect
    branch, a branch to an unknown label, and a statement that is no instruction.
    """
    text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), ptx)
    found = [_function(text, entry) for entry in _ENTRY.finditer(text)]
    if not found:
        raise PtxError("the PTX has no .entry function")
    return tuple(found)


def _function(text: str, entry: re.Match[str]) -> Function:
    end = text.index(")", entry.end())
    parameters = tuple(_PARAMETER.findall(text[entry.end() : end + 1]))
    begin = text.index("{", end)
    body = text[begin + 1 : _closing(text, begin)]
    return Function(
        entry[1], parameters, _blocks(_statements(body, text.count("\n", 0, begin) + 1))
    )


def _closing(text: str, begin: int) -> int:
    """The index of the brace that closes the one at `begin`."""
    depth = 0
    for found in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return begin + found.start()
    raise PtxError(f"line {text.count(chr(10), 0, begin) + 1}: a brace is not closed")


def _statements(body: str, line: int) -> list[str | Instruction]:
    """Labels, as text, and instructions."""
    found: list[str | Instruction] = []
    for text in body.split(";"):
        # A statement begins with a name, so that braces before it are scopes of inline assembly.
        rest = text.lstrip("{} \t\n")
        while label := _LABEL.match(rest):
            found.append(label[1])
            rest = rest[label.end() :].lstrip("{} \t\n")
        at = line + text[: len(text) - len(rest)].count("\n")
        line += text.count("\n")
        rest = rest.strip()
        if not rest or rest.startswith("."):
            continue  # a directive: registers, or a line of the source
        matched = _STATEMENT.match(rest)
        if matched is None:
            raise PtxError(f"line {at}: not an instruction: {rest[:80]!r}")
        found.append(Instruction(matched[3], matched[4].strip(), matched[2] or "", at))
    return found


def _blocks(statements: Sequence[str | Instruction]) -> tuple[Block, ...]:
    blocks, labels = [Block()], {}
    for statement in statements:
        if isinstance(statement, str):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[statement] = len(blocks) - 1
            continue
        if statement.starts("call", "brx"):
            raise PtxError(f"line {statement.line}: cannot follow '{statement}'")
        blocks[-1].instructions.append(statement)
        if statement.starts("bra", *_ENDS):
            blocks.append(Block())
    for index, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        leaves = last is not None and last.starts("bra", *_ENDS) and not last.guard
        if not leaves and index + 1 < len(blocks):
            block.successors.append(index + 1)
        if last is not None and last.starts("bra"):
            target = last.operands.strip()
            if target not in labels:
                raise PtxError(f"line {last.line}: a branch to the unknown label '{target}'")
            block.successors.append(labels[target])
    return tuple(blocks)
