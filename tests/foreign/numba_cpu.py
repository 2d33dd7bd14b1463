"""Numba: the product that it compiles to a call of SciPy's BLAS, and plain loops."""

import numba
import numpy as np
import torch

import r18

LIBRARY, NEEDS = "Numba", ("numba", "scipy")


@r18.check.kernel(like=torch.matmul, arrays="numpy")
@numba.njit
def matmul(a, b):
    """A product as in Numba's documentation, without CUDA's threads."""
    c = np.empty((a.shape[0], b.shape[1]), a.dtype)
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            tmp = a.dtype.type(0)
            for k in range(a.shape[1]):
                tmp += a[i, k] * b[k, j]
            c[i, j] = tmp
    return c


@r18.check.kernel(like=torch.matmul, arrays="numpy")
@numba.njit
def dot(a, b):
    return np.dot(a, b)
