"""A generated file without its problem."""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return x.clamp_min(0)
