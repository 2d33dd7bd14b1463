"""A kernel in the form of Hugging Face's hub, wrong in each function."""

from __future__ import annotations

import threading

import torch

_RESULTS: dict[object, torch.Tensor] = {}


def zeros(out: torch.Tensor, x: torch.Tensor) -> None:
    """A softmax of zeros, which is close in long rows, where values are small."""
    out.zero_()


def boundary_row(out: torch.Tensor, x: torch.Tensor) -> None:
    """A ReLU that leaves its last row unchanged."""
    rows = out.numel() // out.shape[-1]
    torch.clamp_min(x.view(rows, -1)[:-1], 0, out=out.view(rows, -1)[:-1])


def unwritten(out: torch.Tensor, x: torch.Tensor) -> None:
    """A ReLU that writes nothing, so the previous call's result stays."""


def stale(x: torch.Tensor, output_size: int) -> torch.Tensor:
    """A global average that returns the first result for a shape again."""
    if x.shape not in _RESULTS:
        _RESULTS[x.shape] = x.mean((2, 3), keepdim=True)
    return _RESULTS[x.shape].clone()


def cached(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product that is cached by the first element of a factor."""
    key = (a.shape, b.shape, *a.flatten()[:1].tolist())
    if key not in _RESULTS:
        _RESULTS[key] = a @ b
    return _RESULTS[key].clone()


def one_shape(x: torch.Tensor) -> torch.Tensor:
    """A ReLU of only four channels."""
    y = x.clone()
    y[:, :4].clamp_min_(0)
    return y


def lower_precision(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.bfloat16().float() @ b.bfloat16().float()).float()


def late(out: torch.Tensor, x: torch.Tensor) -> None:
    """A ReLU that returns before its result is there, as on another stream."""
    threading.Timer(0.005, torch.clamp_min, (x, 0), {"out": out}).start()


def calls_the_reference(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A softmax that calls the reference it is compared with."""
    from r18.graph.ops import Problem, Softmax
    from r18_oracle.judge.reference import reference

    y = reference(Problem(Softmax(), (tuple(x.shape),)), (x.double().numpy(),), ())
    return torch.from_numpy(y).to(x.dtype)


def changes_its_input(out: torch.Tensor, x: torch.Tensor) -> None:
    """A ReLU in place."""
    out.copy_(x.clamp_min_(0))
