"""The mutation operators: the small changes that are made to a source, by language and kind.

`python`, `cuda`              token mutants: common mistakes in an expression or a statement
`python_state`, `cuda_state`  structural mutants: mistakes in what is kept, shared or waited for
`python_view`, `cuda_view`    a source to mutate, what of it may change, and its edits in order
`cuda_tokens`                 the tokens of CUDA C++
"""

from collections.abc import Iterable, Iterator

Change = tuple[int, int, str]
"""(start, end, text): the text replaces source[start:end]."""

Edit = tuple[str, str, int, int, str]
"""(operator, scope, start, end, text): see `r18_oracle.mutation.mutants.Language`."""

Found = tuple[int, int, int, str, str, str]
"""(start, order, end, text, scope, operator): order is the operator's place among the others."""


def in_order(found: Iterable[Found]) -> Iterator[Edit]:
    """The edits in the order of the source, and at one place of the operators."""
    for start, _, end, text, scope, name in sorted(found):
        yield name, scope, start, end, text


STATE = {
    "cache_key": "drop a field from a cache key",
    "wait": "move a wait after the statement that needs it",
    "scratch": "share a scratch buffer",
    "loop_rest": "skip the rest of a loop",
    "rounding": "truncate instead of rounding",
    "store_wait": "leave out a wait",
    "resume": "resume by count",
}
"""The classes of structural mutants, in words."""

KINDS = {"tokens": "a token or an expression", "state": "; ".join(STATE.values())}
"""The kinds of mutants, in words."""

__all__ = ["KINDS", "STATE", "Change", "Edit", "in_order"]
