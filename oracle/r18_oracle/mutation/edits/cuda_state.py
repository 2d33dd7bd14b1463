"""Structural mutants of CUDA C++: mistakes in sharing, waiting or rounding.

The classes are those of `r18_oracle.mutation.edits.STATE`; a kernel's source has no cache key and
resumes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from r18_oracle.mutation.edits import Change, Edit
from r18_oracle.mutation.edits.cuda_tokens import OPENING
from r18_oracle.mutation.edits.cuda_view import Operator, View, edits_by

WAIT = re.compile(r"^(__sync\w+|\w*_?wait(_\w+)?|\w*barrier|cluster_sync|\w*fence\w*)$")
"""Calls that wait for other threads, for copies or for stores, or that order them."""
STORE_WAIT = re.compile(r"wait|fence")
PLACES = {"stage", "slot", "buffer", "phase"}
"""Variables that select a part of shared memory."""
SHARED = re.compile(r"^(smem|shared|scratch|workspace)\w*$")
ROUNDED = re.compile(r"_rn\b|cvt\.rna?\b")
PAIRED = re.compile(r"__floats2|__float22")
"""Conversions of two values at once, which round to nearest only."""
CONVERTED = {"__float2half": "__float2half_rz", "__float2bfloat16": "__float2bfloat16_rz"}


def edits(source: str) -> Iterator[Edit]:
    """Every change that a class makes, in the order of the source."""
    return edits_by(OPERATORS, source)


def _wait(view: View) -> Iterator[Change]:
    """A wait that is moved after the next statement."""
    followers = dict(view.statements)
    for first, last in view.statements:
        end = followers.get(last + 1)
        if not _waits(view, first, last) or end is None or _waits(view, last + 1, end):
            continue
        if view.tokens[last + 1].text in ("return", "break", "continue", "else"):
            continue
        start, stop = view.tokens[first].start, view.tokens[end].end
        between = view.source.text[view.tokens[last].end : view.tokens[last + 1].start]
        moved = f"{view.text(last + 1, end)}{between}{view.text(first, last)}"
        yield start, stop, moved


def _store_wait(view: View) -> Iterator[Change]:
    """A missing wait or fence. For barriers see the operator `synchronisation`."""
    for first, last in view.statements:
        if _waits(view, first, last) and STORE_WAIT.search(view.tokens[first].text):
            yield view.tokens[first].start, view.tokens[last].end, ";"


def _waits(view: View, first: int, last: int) -> bool:
    """Whether a statement is only a call that waits."""
    name, after = view.tokens[first].text, view.tokens[first + 1].text
    return bool(WAIT.match(name)) and after in ("(", "<") and view.allowed[first]


def _scratch(view: View) -> Iterator[Change]:
    """The first part of shared memory for all of its users."""
    for index in range(1, len(view.tokens) - 1):
        token, before, after = view.tokens[index], view.tokens[index - 1], view.tokens[index + 1]
        if not view.allowed[index]:
            continue
        if token.text in PLACES:
            inside = before.text in ("[", "(", ",", "+", "*") and before.kind == "mark"
            if inside and after.text in ("]", ")", ",", "+", "*"):
                yield view.replace(index, "0")
        if SHARED.match(token.text) and after.text == "+":
            end = index + 1
            while view.tokens[end + 1].text not in (",", ")", "]", ";"):
                end += 1
                if view.tokens[end].text in OPENING:
                    end = view.source.partners.get(end, end)
            yield token.end, view.tokens[end].end, ""


def _loop_rest(view: View) -> Iterator[Change]:
    """Only the first iteration of a loop."""
    for index, token in enumerate(view.tokens[:-1]):
        if token.text != "for" or not view.allowed[index]:
            continue
        body = view.source.partners.get(index + 1, -2) + 1
        if body > 0 and view.tokens[body].text == "{":
            close = view.tokens[view.source.partners[body]].start
            if view.tokens[view.source.partners[body] - 1].text in (";", "}"):
                yield close, close, "break; "


def _rounding(view: View) -> Iterator[Change]:
    """Towards zero instead of to nearest; down instead of up."""
    text = view.source.text
    for index, token in enumerate(view.tokens[:-1]):
        if token.kind == "string":
            for found in ROUNDED.finditer(token.text):
                start = token.start + found.start()
                yield start, start + len(found[0]), re.sub("rna?$", "rz", found[0])
        if token.kind != "name" or view.tokens[index + 1].text != "(":
            continue
        if token.text.endswith("_rn") and not PAIRED.match(token.text):
            yield view.replace(index, token.text[:-1] + "z")
        if token.text in CONVERTED:
            yield view.replace(index, CONVERTED[token.text])
        if token.text == "ceil_div" and view.source.scopes[index]:
            close = view.source.partners[index + 1]
            inside = text[view.tokens[index + 1].end : view.tokens[close].start]
            left, comma, right = inside.partition(",")
            if comma and "," not in right:
                yield token.start, view.tokens[close].end, f"(({left}) / ({right.strip()}))"


OPERATORS: dict[str, Operator] = {
    "wait": _wait,
    "scratch": _scratch,
    "loop_rest": _loop_rest,
    "rounding": _rounding,
    "store_wait": _store_wait,
}
