"""A convolution whose weight has another name."""

import torch
from torch import nn


def two(value):
    return value if isinstance(value, tuple) else (value, value)


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, bias=False):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=bias)

    def forward(self, x):
        return self.conv(x)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, bias=False):
        super().__init__()
        made = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.weight, self.bias = made.weight, made.bias
        self.stride, self.padding = stride, padding

    def forward(self, x):
        r, s = self.weight.shape[2:]
        columns = nn.functional.unfold(x, (r, s), 1, self.padding, self.stride)
        (ph, pw), (sh, sw) = map(two, (self.padding, self.stride))
        h, w = (x.shape[2] + 2 * ph - r) // sh + 1, (x.shape[3] + 2 * pw - s) // sw + 1
        y = (self.weight.flatten(1) @ columns).reshape(len(x), len(self.weight), h, w)
        return y if self.bias is None else y + self.bias[:, None, None]


def get_inputs():
    return [torch.rand(2, 8, 16, 16)]


def get_init_inputs():
    return [8, 16, 3, 1, 1]
