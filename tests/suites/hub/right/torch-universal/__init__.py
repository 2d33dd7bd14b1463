"""A kernel in the form of Hugging Face's hub: results are returned, or written to `out`."""

from __future__ import annotations

import torch


def relu(out: torch.Tensor, x: torch.Tensor) -> None:
    torch.clamp_min(x, 0, out=out)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def adaptive_avg_pool2d(out: torch.Tensor, x: torch.Tensor, output_size: int) -> torch.Tensor:
    return torch.mean(x, dim=(2, 3), keepdim=True, out=out)
