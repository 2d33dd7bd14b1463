"""The mutation operators: what small changes are made to a source, by language and kind.

`python`, `cuda`              token mutants: common mistakes in an expression or a statement
`python_state`, `cuda_state`  structural mutants: mistakes in what is kept, shared or waited for
`python_view`, `cuda_tokens`  a source to mutate, and what of it may change
"""

STATE = {
    "cache_key": "drop a field from a cache key",
    "wait": "move a wait behind the statement that needs it",
    "scratch": "share a scratch",
    "loop_rest": "skip the rest of a loop",
    "rounding": "truncate a rounding",
    "store_wait": "leave out a wait",
    "resume": "resume by count",
}
"""The classes of structural mutants, in words."""

KINDS = {"tokens": "a token or an expression", "state": "; ".join(STATE.values())}
"""The kinds of mutants, in words."""

__all__ = ["KINDS", "STATE"]
