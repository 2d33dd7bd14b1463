"""NumPy's matrix products: by its BLAS, and by the loops of einsum."""

import numpy as np
import torch

import r18

LIBRARY, NEEDS = "NumPy", ("numpy",)


@r18.check.kernel(like=torch.matmul, arrays="numpy")
def matmul(a, b):
    return np.matmul(a, b)


@r18.check.kernel(like=torch.matmul, arrays="numpy")
def einsum(a, b):
    return np.einsum("nk,ko->no", a, b)


@r18.check.kernel(like=torch.nn.functional.adaptive_avg_pool2d, arrays="numpy")
def mean(x):
    return x.mean(axis=(2, 3), keepdims=True)
