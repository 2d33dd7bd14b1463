"""BackendBench: a folder of kernels, one for each overload of an ATen operator.

    generated_kernels/relu__default/relu__default_implementation_v1.py
        def relu__default_kernel_impl(input): ...

The folder's name is the overload's, with `__` for each dot. The suite loads the first file by name
that begins with `<folder>_implementation`, and calls `<folder>_kernel_impl` as ATen calls the
operator (BackendBench/backends/directory.py, utils.py in github.com/meta-pytorch/BackendBench).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from r18_oracle.functions.suites.adapted import Adapted, pair

SUFFIX = "_kernel_impl"
Impl = Callable[..., Any]


def _first(result: Any) -> Any:
    """The tensor of an operator that returns more: indices, or statistics."""
    return result[0] if isinstance(result, tuple | list) else result


def _convolution(f: Impl, x: Any, w: Any, b: Any, stride: Any, padding: Any) -> Any:
    return f(x, w, b, [*pair(stride)], [*pair(padding)], [1, 1], False, [0, 0], 1)


def _conv2d(f: Impl, x: Any, w: Any, b: Any, stride: Any, padding: Any) -> Any:
    return f(x, w, b, [*pair(stride)], [*pair(padding)])


def _pool(f: Impl, x: Any, kernel_size: Any, stride: Any, padding: Any) -> Any:
    return _first(f(x, [*pair(kernel_size)], [*pair(stride)], [*pair(padding)]))


def _norm(f: Impl, x: Any, mean: Any, var: Any, w: Any, b: Any, **how: Any) -> Any:
    return _first(f(x, w, b, mean, var, how["training"], how["momentum"], how["eps"]))


def _norm_of_inference(f: Impl, x: Any, mean: Any, var: Any, w: Any, b: Any, **how: Any) -> Any:
    return _first(f(x, w, b, mean, var, how["momentum"], how["eps"]))


def _norm_with_cudnn(f: Impl, x: Any, mean: Any, var: Any, w: Any, b: Any, **how: Any) -> Any:
    return f(x, w, b, mean, var, how["training"], how["momentum"], how["eps"], True)


OVERLOADS: dict[str, tuple[str, Callable[..., Any]]] = {
    "relu.default": ("relu", lambda f, x: f(x)),
    "add.Tensor": ("add", lambda f, a, b: f(a, b)),
    "mm.default": ("matmul", lambda f, a, b: f(a, b)),
    "matmul.default": ("matmul", lambda f, a, b: f(a, b)),
    "linear.default": ("linear", lambda f, x, w, b: f(x, w, b)),
    "addmm.default": ("linear", lambda f, x, w, b: f(b, x, w.t())),
    "conv2d.default": ("conv2d", _conv2d),
    "convolution.default": ("conv2d", _convolution),
    "max_pool2d.default": ("max_pool2d", _pool),
    "max_pool2d_with_indices.default": ("max_pool2d", _pool),
    "adaptive_avg_pool2d.default": ("adaptive_avg_pool2d", lambda f, x, output_size: f(x, [1, 1])),
    "_adaptive_avg_pool2d.default": ("adaptive_avg_pool2d", lambda f, x, output_size: f(x, [1, 1])),
    "mean.dim": ("adaptive_avg_pool2d", lambda f, x, output_size: f(x, [-1, -2], True)),
    "softmax.int": ("softmax", lambda f, x, dim: f(x, dim)),
    "_softmax.default": ("softmax", lambda f, x, dim: f(x, dim, False)),
    "batch_norm.default": ("batch_norm", _norm_with_cudnn),
    "native_batch_norm.default": ("batch_norm", _norm),
    "_native_batch_norm_legit_no_training.default": ("batch_norm", _norm_of_inference),
}
"""By overload: the operator that it is like, and how a kernel is called with its arguments."""


def overload_of(folder: str) -> str:
    """`max_pool2d__default` is `max_pool2d.default`; the suite replaces from the right."""
    return ".".join(part[::-1] for part in reversed(folder[::-1].split("__")))


def adapted(name: str, function: Impl) -> Adapted | None:
    """The kernel of a function's name; None if it is not named after an overload in the table."""
    found = OVERLOADS.get(overload_of(name.removesuffix(SUFFIX)))
    if not name.endswith(SUFFIX) or found is None:
        return None
    like, call = found

    def called(*arrays: Any, **settings: Any) -> Any:
        return call(function, *arrays, **settings)

    return Adapted(like, called)


def kernels_in(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The places of kernels to judge, and sentences for the others, by folder.

    folder: `generated_kernels`, or one operator's folder in it.
    """
    places, refused = [], {}
    for inner in sorted((folder, *folder.iterdir())):
        if not inner.is_dir():
            continue
        files = sorted(inner.glob(f"{inner.resolve().name}_implementation*.py"))
        if not files:
            continue
        name = inner.resolve().name
        if (overload := overload_of(name)) in OVERLOADS:
            places.append(f"{files[0]}:{name}{SUFFIX}")
        else:
            refused[str(inner)] = f"{overload} is like no operator that is judged"
    return places, refused


__all__ = ["OVERLOADS", "SUFFIX", "adapted", "kernels_in", "overload_of"]
