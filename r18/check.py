"""Judge functions in a user's own test suite.

    @r18.check.kernel(like=torch.nn.functional.conv2d)
    def conv2d(x, w, b=None, stride=1, padding=0): ...

    def test_conv2d():
        r18.check.assert_kernel(conv2d)

The mark costs nothing and imports nothing, so it may stay in the code that is shipped; `r18 check
FILE` judges every marked function of a file. `assert_kernel` needs the oracle, which the core does
not import: it is found by entry point (`r18.hooks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from r18.errors import UsageError, show
from r18.hooks import hook

MARK = "__r18_check__"
"""The attribute that marks a function: a dict of the options below."""
OPTIONS = ("like", "dtype", "arrays", "contract", "refuses", "deterministic")

F = TypeVar("F", bound=Callable[..., Any])


def kernel(like: object | None = None, **options: Any) -> Callable[[F], F]:
    """Mark a function as a kernel that computes what `like` does.

    like: one of PyTorch's operators or its name; by default the one that the function is named
    after. Options: dtype, arrays, contract, deterministic, as `r18 check --help` explains them, and
    refuses, a function that is called as this one is, with shapes in place of arrays, and returns a
    sentence for a call that this one does not take.
    Raises `UsageError` for others.
    """
    if unknown := options.keys() - set(OPTIONS):
        raise UsageError(
            f"r18.check.kernel has no option {show(min(unknown))}; it takes {', '.join(OPTIONS)}"
        )
    if callable(like) and getattr(like, MARK, None) is None and not options and _is_plain(like):
        raise UsageError("write @r18.check.kernel(like=...), with an operator to compare with")
    found = {"like": like, **options}

    def marked(function: F) -> F:
        setattr(function, MARK, {k: v for k, v in found.items() if v is not None})
        return function

    return marked


def _is_plain(like: object) -> bool:
    """Whether it is the decorated function itself, as of `@r18.check.kernel` without a call."""
    return not str(getattr(like, "__module__", "")).startswith(("torch", "numpy", "cupy"))


def assert_kernel(function: Callable[..., Any], like: object | None = None, **options: Any) -> Any:
    """Judge a function; raises `AssertionError` with the finding and how to replay it.

    like and options: those of the function's mark, and in addition profile, seed, network,
    isolated and findings (`r18_oracle.checked.assert_kernel`). Returns the result, which has a
    `text()` and a `contract`. Raises `UsageError` where the oracle is not installed.
    """
    return hook("assert_kernel", "r18.check")(function, like, **options)


__all__ = ["assert_kernel", "kernel"]
