"""CuPy's products, by cuBLAS, and its own kernels of sums and correlations."""

import cupy
import cupyx.scipy.ndimage
import cupyx.scipy.special
import torch
import torch.nn.functional as F

import r18

LIBRARY, NEEDS = "CuPy", ("cupy",)
FAULTS = {
    "dot_float16": "an output of one element is summed by a kernel of CuPy's own, of products that "
    "it has rounded to float16",
    "einsum": "products of one term are by a kernel of CuPy's own, which makes subnormal numbers "
    "zero, as cuBLAS does not",
    "ndimage_correlate": "weights that are zero are skipped, so NaN and infinities under them are "
    "lost; so are subnormal weights, whatever they are multiplied by",
}


@r18.check.kernel(like=torch.matmul, arrays="cupy")
def matmul(a, b):
    return cupy.matmul(a, b)


@r18.check.kernel(like=torch.matmul, arrays="cupy", dtype="float16")
def dot_float16(a, b):
    return cupy.dot(a, b)


@r18.check.kernel(like=torch.matmul, arrays="cupy")
def einsum(a, b):
    return cupy.einsum("nk,ko->no", a, b)


@r18.check.kernel(like=F.conv2d, arrays="cupy")
def ndimage_correlate(x, w):
    """All channels of an image at once: the middle plane holds their sum, for whole windows."""
    (kh, kw), (h, wide) = w.shape[2:], x.shape[2:]
    full = cupy.stack([cupy.stack([_middle(i, o) for o in w]) for i in x])
    top, left = kh // 2, kw // 2
    return full[:, :, top : top + h - kh + 1, left : left + wide - kw + 1]


def _middle(image, window):
    return cupyx.scipy.ndimage.correlate(image, window, mode="constant")[len(window) // 2]


@r18.check.kernel(like=F.softmax, arrays="cupy")
def softmax(x):
    return cupyx.scipy.special.softmax(x, axis=1)


@r18.check.kernel(like=F.adaptive_avg_pool2d, arrays="cupy")
def mean(x):
    return x.mean(axis=(2, 3), keepdims=True)
