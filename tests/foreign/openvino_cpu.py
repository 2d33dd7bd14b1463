"""OpenVINO's kernels on the CPU, in float32: a compiled model of one operator for each shape."""

from functools import cache

import numpy as np
import openvino
import torch
import torch.nn.functional as F
from openvino import opset13 as ov

import r18

LIBRARY, NEEDS = "OpenVINO", ("openvino",)
FAULTS = {
    "conv2d": "with one channel, one column of outputs and a horizontal stride, the stride is "
    "applied to the rows too",
    "softmax": "a row that holds NaN gives numbers in place of NaN",
}
FAULTS_WITH = {"conv2d": "AVX-512"}


@cache
def compiled(operator, shapes, *settings):
    """A model of the operator on float32 inputs of these shapes, in full precision."""
    inputs = [ov.parameter(shape, np.float32) for shape in shapes]
    model = openvino.Model([getattr(ov, operator)(*inputs, *settings)], inputs)
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return openvino.Core().compile_model(model, "CPU", hints)


def run(operator, arrays, *settings):
    request = compiled(operator, tuple(a.shape for a in arrays), *settings).create_infer_request()
    return request.infer(list(arrays))[0]


def pair(extent):
    return extent if isinstance(extent, tuple) else (extent, extent)


@r18.check.kernel(like=F.conv2d, arrays="numpy")
def conv2d(x, w, b=None, stride=1, padding=0):
    pads = pair(padding)
    y = run("convolution", (x, w), pair(stride), pads, pads, (1, 1))
    return y if b is None else run("add", (y, b.reshape(1, -1, 1, 1)))


def one_channel(x, w, b=None, stride=1, padding=0):
    return "one channel" if x[1] == 1 else None


@r18.check.kernel(like=F.conv2d, arrays="numpy", refuses=one_channel)
def conv2d_of_channels(x, w, b=None, stride=1, padding=0):
    return conv2d(x, w, b, stride, padding)


@r18.check.kernel(like=torch.matmul, arrays="numpy")
def matmul(a, b):
    return run("matmul", (a, b), False, False)


@r18.check.kernel(like=F.softmax, arrays="numpy")
def softmax(x):
    return run("softmax", (x,), 1)
