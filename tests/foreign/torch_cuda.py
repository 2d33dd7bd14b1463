"""PyTorch's products and convolutions on a GPU: cuBLAS and cuDNN, in each precision."""

import torch
import torch.nn.functional as F

import r18

LIBRARY, NEEDS = "PyTorch", ("torch",)
FAULTS = {
    "linear_bfloat16": "for one row and few outputs cuBLASLt rounds the sum to bfloat16 before it "
    "adds the bias: 1001 - 1000 gives 0",
    "linear_bfloat16_reduced": "as linear_bfloat16; partial sums are not at fault",
    "conv2d_float16": "cuDNN sums a 1×1 window of 1,152 channels in float16, and keeps 11 bits",
}


def products(**switches):
    """`torch.matmul` with these settings of `torch.backends.cuda.matmul`."""

    def matmul(a, b):
        for name, value in switches.items():
            setattr(torch.backends.cuda.matmul, name, value)
        return torch.matmul(a, b)

    return matmul


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda")
def matmul(a, b):
    return products(allow_tf32=False)(a, b)


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda", contract="tf32")
def matmul_tf32(a, b):
    return products(allow_tf32=True)(a, b)


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda", dtype="float64")
def matmul_float64(a, b):
    return torch.matmul(a, b)


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda", dtype="float16")
def matmul_float16(a, b):
    return products(allow_fp16_reduced_precision_reduction=False)(a, b)


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda", dtype="float16")
def matmul_float16_reduced(a, b):
    """A product whose split sums may be added in float16."""
    return products(allow_fp16_reduced_precision_reduction=True)(a, b)


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda", dtype="bfloat16")
def matmul_bfloat16(a, b):
    return products(allow_bf16_reduced_precision_reduction=False)(a, b)


@r18.check.kernel(like=F.linear, arrays="torch-cuda", dtype="bfloat16")
def linear_bfloat16(x, w, b):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return F.linear(x, w, b)


@r18.check.kernel(like=F.linear, arrays="torch-cuda", dtype="bfloat16")
def linear_bfloat16_reduced(x, w, b):
    """PyTorch's default: split sums of a product may be added in bfloat16."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    return F.linear(x, w, b)


@r18.check.kernel(like=F.conv2d, arrays="torch-cuda")
def conv2d(x, w, b=None, stride=1, padding=0):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True):
        return F.conv2d(x, w, b, stride, padding)


@r18.check.kernel(like=F.conv2d, arrays="torch-cuda", dtype="float16")
def conv2d_float16(x, w, b=None, stride=1, padding=0):
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        return F.conv2d(x, w, b, stride, padding)


@r18.check.kernel(like=F.batch_norm, arrays="torch-cuda")
def batch_norm(x, running_mean, running_var, weight, bias, training=False, momentum=0.1, eps=1e-5):
    return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


@r18.check.kernel(like=F.max_pool2d, arrays="torch-cuda")
def max_pool2d(x, kernel_size, stride=None, padding=0):
    return F.max_pool2d(x, kernel_size, stride, padding)


@r18.check.kernel(like=F.softmax, arrays="torch-cuda")
def softmax(x):
    return F.softmax(x, dim=1)
