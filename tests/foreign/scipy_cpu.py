"""SciPy: direct correlations, its BLAS, sparse products and softmax."""

import numpy as np
import scipy.linalg
import scipy.ndimage
import scipy.signal
import scipy.sparse
import scipy.special
import torch
import torch.nn.functional as F

import r18

LIBRARY, NEEDS = "SciPy", ("scipy",)
FAULTS = {
    "ndimage_correlate": "weights below 2.2e-16 count as zero, whatever they are multiplied by",
}


@r18.check.kernel(like=F.conv2d, arrays="numpy")
def correlate2d(x, w):
    """Correlations of one plane of image and weight at a time, summed over channels."""
    planes = [[[_valid(a, b) for a, b in zip(i, o, strict=True)] for o in w] for i in x]
    return np.sum(planes, axis=2)


def _valid(image, window):
    return scipy.signal.correlate2d(image, window, mode="valid")


@r18.check.kernel(like=F.conv2d, arrays="numpy")
def correlate(x, w):
    """A correlation over all channels at once, without an FFT."""
    direct = scipy.signal.correlate
    outputs = [[direct(i, o, mode="valid", method="direct")[0] for o in w] for i in x]
    return np.array(outputs)


@r18.check.kernel(like=F.conv2d, arrays="numpy")
def ndimage_correlate(x, w):
    """Correlations of one plane at a time, at the outputs whose windows are whole."""
    (kh, kw), (h, wide) = w.shape[2:], x.shape[2:]
    full = np.array([[sum(map(_same, i, o)) for o in w] for i in x])
    top, left = kh // 2, kw // 2
    return full[:, :, top : top + h - kh + 1, left : left + wide - kw + 1]


def _same(image, window):
    return scipy.ndimage.correlate(image, window, mode="constant")


@r18.check.kernel(like=torch.matmul, arrays="numpy")
def sgemm(a, b):
    return scipy.linalg.blas.sgemm(1.0, a, b)


@r18.check.kernel(like=torch.matmul, arrays="numpy", dtype="float64")
def dgemm(a, b):
    return scipy.linalg.blas.dgemm(1.0, a, b)


@r18.check.kernel(like=torch.matmul, arrays="numpy")
def sparse_product(a, b):
    return scipy.sparse.csr_array(a) @ b


@r18.check.kernel(like=F.softmax, arrays="numpy")
def softmax(x):
    return scipy.special.softmax(x, axis=1)
