"""Pads with zeros, which no uniform input is below."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, kernel_size, stride, padding, dilation):
        super().__init__()
        self.pool = nn.MaxPool2d(kernel_size, stride, padding, dilation)

    def forward(self, x):
        return self.pool(x)


class ModelNew(nn.Module):
    def __init__(self, kernel_size, stride, padding, dilation):
        super().__init__()
        self.settings = kernel_size, stride
        self.padding = padding if isinstance(padding, tuple) else (padding, padding)

    def forward(self, x):
        ph, pw = self.padding
        return nn.functional.max_pool2d(nn.functional.pad(x, (pw, pw, ph, ph)), *self.settings)


def get_inputs():
    return [torch.rand(2, 4, 16, 16)]


def get_init_inputs():
    return [3, 2, 1, 1]
