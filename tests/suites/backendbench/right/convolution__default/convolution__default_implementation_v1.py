"""Windows as the columns of a matrix."""

import torch


def convolution__default_kernel_impl(
    input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    n, _, h, w = input.shape
    r, s = weight.shape[2:]
    columns = torch.nn.functional.unfold(input, (r, s), dilation, padding, stride)
    y = weight.flatten(1) @ columns
    h = (h + 2 * padding[0] - r) // stride[0] + 1
    w = (w + 2 * padding[1] - s) // stride[1] + 1
    y = y.reshape(n, len(weight), h, w)
    return y if bias is None else y + bias[:, None, None]
