"""As it is written; the two statistics are empty."""

import torch


def _native_batch_norm_legit_no_training__default_kernel_impl(
    input, weight, bias, mean, var, momentum, eps
):
    weight, bias, mean, var = (a[:, None, None] for a in (weight, bias, mean, var))
    y = (input - mean) / torch.sqrt(var + eps) * weight + bias
    return y, torch.empty(0), torch.empty(0)
