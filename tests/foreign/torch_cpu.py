"""PyTorch's operators on the CPU: ATen, oneDNN and the BLAS that PyTorch is built with."""

import warnings

import torch
import torch.nn.functional as F

import r18

LIBRARY, NEEDS = "PyTorch", ("torch",)
FAULTS = {
    "conv2d_bfloat16": "an infinity or NaN in a pixel that the stride skips makes the output next "
    "to it NaN",
}
FAULTS_WITH = {"conv2d_bfloat16": "AVX-512 BF16"}
warnings.filterwarnings("ignore", "TF32 acceleration")  # at each change of oneDNN's flags


@r18.check.kernel(like=F.conv2d, arrays="torch")
def conv2d(x, w, b=None, stride=1, padding=0):
    return F.conv2d(x, w, b, stride, padding)


@r18.check.kernel(like=F.conv2d, arrays="torch")
def conv2d_nnpack(x, w, b=None, stride=1, padding=0):
    """A convolution by NNPACK, which from 16 images on uses Winograd's F(6×6, 3×3) and FFTs."""
    with torch.backends.mkldnn.flags(enabled=False):
        return F.conv2d(x, w, b, stride, padding)


@r18.check.kernel(like=F.conv2d, arrays="torch")
def conv2d_im2col(x, w, b=None, stride=1, padding=0):
    """A convolution by ATen itself: the windows as a matrix, and the BLAS."""
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
        return F.conv2d(x, w, b, stride, padding)


@r18.check.kernel(like=F.conv2d, arrays="torch", dtype="bfloat16")
def conv2d_bfloat16(x, w, b=None, stride=1, padding=0):
    return F.conv2d(x, w, b, stride, padding)


@r18.check.kernel(like=F.linear, arrays="torch")
def linear(x, w, b):
    return F.linear(x, w, b)


@r18.check.kernel(like=F.linear, arrays="torch", dtype="bfloat16")
def linear_bfloat16(x, w, b):
    return F.linear(x, w, b)


@r18.check.kernel(like=F.linear, arrays="torch", dtype="float16")
def linear_float16(x, w, b):
    return F.linear(x, w, b)


@r18.check.kernel(like=torch.matmul, arrays="torch")
def matmul(a, b):
    return torch.matmul(a, b)


@r18.check.kernel(like=torch.matmul, arrays="torch", dtype="float64")
def matmul_float64(a, b):
    return torch.matmul(a, b)


@r18.check.kernel(like=F.batch_norm, arrays="torch")
def batch_norm(x, running_mean, running_var, weight, bias, training=False, momentum=0.1, eps=1e-5):
    return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


@r18.check.kernel(like=F.max_pool2d, arrays="torch")
def max_pool2d(x, kernel_size, stride=None, padding=0):
    return F.max_pool2d(x, kernel_size, stride, padding)


@r18.check.kernel(like=F.adaptive_avg_pool2d, arrays="torch")
def adaptive_avg_pool2d(x):
    return F.adaptive_avg_pool2d(x, 1)


@r18.check.kernel(like=F.softmax, arrays="torch")
def softmax(x):
    return F.softmax(x, dim=1)


@r18.check.kernel(like=F.relu, arrays="torch")
def relu(x):
    return F.relu(x)


@r18.check.kernel(like=torch.add, arrays="torch")
def add(x, y):
    return torch.add(x, y)
