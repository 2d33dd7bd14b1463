"""All zeros."""

import torch


def _softmax__default_kernel_impl(input, dim, half_to_float):
    return torch.zeros_like(input)
