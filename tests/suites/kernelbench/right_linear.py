"""A linear layer by addmm."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.layer = nn.Linear(input_size, output_size)

    def forward(self, x):
        return self.layer(x)


class ModelNew(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.layer = nn.Linear(input_size, output_size)

    def forward(self, x):
        return torch.addmm(self.layer.bias, x, self.layer.weight.t())


def get_inputs():
    return [torch.rand(8, 32)]


def get_init_inputs():
    return [32, 16]
