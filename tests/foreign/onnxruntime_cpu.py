"""ONNX Runtime's kernels (MLAS): a model of one operator for each shape."""

from functools import cache

import onnxruntime
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

import r18

LIBRARY, NEEDS = "ONNX Runtime", ("onnxruntime", "onnx")
FAULTS = {
    "max_pool2d": "the maximum starts at the lowest finite number and skips NaN: a window of NaN, "
    "or of −Inf, gives −3.4e38",
}


@cache
def session(operator, shapes, **attributes):
    """A session of the operator on float32 inputs of these shapes."""
    names = [f"x{index}" for index in range(len(shapes))]
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    inputs = [info(name, kind, shape) for name, shape in zip(names, shapes, strict=True)]
    node = helper.make_node(operator, names, ["y"], **attributes)
    graph = helper.make_graph([node], operator, inputs, [info("y", kind, None)])
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run(operator, *arrays, **attributes):
    made = session(operator, tuple(array.shape for array in arrays), **attributes)
    return made.run(None, {f"x{index}": array for index, array in enumerate(arrays)})[0]


def pair(extent):
    return extent if isinstance(extent, tuple) else (extent, extent)


@r18.check.kernel(like=F.conv2d, arrays="numpy")
def conv2d(x, w, b=None, stride=1, padding=0):
    given = (x, w) if b is None else (x, w, b)
    return run("Conv", *given, strides=pair(stride), pads=pair(padding) * 2)


@r18.check.kernel(like=torch.matmul, arrays="numpy")
def matmul(a, b):
    return run("MatMul", a, b)


@r18.check.kernel(like=F.linear, arrays="numpy")
def gemm(x, w, b):
    return run("Gemm", x, w, b, transB=1)


@r18.check.kernel(like=F.batch_norm, arrays="numpy")
def batch_norm(x, running_mean, running_var, weight, bias, eps=1e-5):
    return run("BatchNormalization", x, weight, bias, running_mean, running_var, epsilon=eps)


@r18.check.kernel(like=F.max_pool2d, arrays="numpy")
def max_pool2d(x, kernel_size, stride=None, padding=0):
    steps, pads = pair(stride or kernel_size), pair(padding) * 2
    return run("MaxPool", x, kernel_shape=pair(kernel_size), strides=steps, pads=pads)


@r18.check.kernel(like=F.adaptive_avg_pool2d, arrays="numpy")
def global_average_pool(x):
    return run("GlobalAveragePool", x)


@r18.check.kernel(like=F.softmax, arrays="numpy")
def softmax(x):
    return run("Softmax", x, axis=1)


@r18.check.kernel(like=F.relu, arrays="numpy")
def relu(x):
    return run("Relu", x)


@r18.check.kernel(like=torch.add, arrays="numpy")
def add(x, y):
    return run("Add", x, y)
