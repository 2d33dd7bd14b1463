"""Leaves out the last row of outputs if their count is odd, as a tile of two rows does."""

import torch


def convolution__default_kernel_impl(
    input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    y = torch.nn.functional.conv2d(input, weight, bias, stride, padding)
    out = torch.zeros_like(y)
    rows = y.shape[2] // 2 * 2
    out[:, :, :rows] = y[:, :, :rows]
    return out
