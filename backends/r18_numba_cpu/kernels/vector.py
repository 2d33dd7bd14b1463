"""Vectors of float32 as a Numba type, and the operations on them.

Numba relies on LLVM to vectorize loops. Where registers decide the speed, the kernels use this type
to state what registers hold. A vector is as wide as a register of this machine. In Python code it
behaves like a float32: `+`, `-`, `*` and `/` work lane by lane.
"""

from __future__ import annotations

import operator
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, overload, register_model

from r18_numba_cpu.kernels.jit import function

intrinsic: Any = extending.intrinsic

FEATURES = llvmlite.binding.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4
"""float32 lanes in a vector register of this machine."""

FLOAT, INDEX = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)
FLOAT_ALIGNMENT = 4  # bytes: a vector may begin at any float


class VectorType(types.Type):
    """LANES float32 lanes."""

    def __init__(self) -> None:
        super().__init__(f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


# -- memory ------------------------------------------------------------------------------------


def address(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """A pointer to element `at` of a 1-d float32 array."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.gep(data, [at])


def as_vector_pointer(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, VECTOR.as_pointer())


@intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """The vector array[at : at + LANES]."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *values)
        return builder.load(as_vector_pointer(builder, pointer), align=FLOAT_ALIGNMENT)

    return vector(array, types.int64), generate


@intrinsic
def store(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + LANES] = value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], as_vector_pointer(builder, pointer), align=FLOAT_ALIGNMENT)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


def lane_mask(builder: Any, count: Any) -> Any:
    """The mask of the lanes below `count`."""
    lanes = ir.Constant(ir.VectorType(INDEX, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, splat(builder, count))


def splat(builder: Any, scalar: Any) -> Any:
    """A vector with the scalar in every lane."""
    one = ir.VectorType(scalar.type, LANES)
    empty = ir.Constant(one, ir.Undefined)
    single = builder.insert_element(empty, scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(single, empty, zeros)


@intrinsic
def masked_load(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """array[at : at + count] in the first `count` lanes, zeros in the others. Reads only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *values[:2])
        kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), ir.IntType(32), MASK, VECTOR])
        name = f"llvm.masked.load.v{LANES}f32.p0v{LANES}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(
            function,
            [
                as_vector_pointer(builder, pointer),
                ir.Constant(ir.IntType(32), FLOAT_ALIGNMENT),
                lane_mask(builder, values[2]),
                ir.Constant(VECTOR, None),
            ],
        )

    return vector(array, types.int64, types.int64), generate


@intrinsic
def masked_store(typing: Any, array: Any, at: Any, value: Any, count: Any) -> Any:
    """array[at : at + count] = the first `count` lanes. Writes only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = address(context, builder, signature.args[0], *values[:2])
        kind = ir.FunctionType(ir.VoidType(), [VECTOR, VECTOR.as_pointer(), ir.IntType(32), MASK])
        name = f"llvm.masked.store.v{LANES}f32.p0v{LANES}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(
            function,
            [
                values[2],
                as_vector_pointer(builder, pointer),
                ir.Constant(ir.IntType(32), FLOAT_ALIGNMENT),
                lane_mask(builder, values[3]),
            ],
        )
        return context.get_dummy_value()

    return types.void(array, types.int64, vector, types.int64), generate


# -- arithmetic --------------------------------------------------------------------------------


@intrinsic
def broadcast(typing: Any, scalar: Any) -> Any:
    """A vector with the float32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return splat(builder, values[0])

    return vector(types.float32), generate


@intrinsic
def relu(typing: Any, value: Any) -> Any:
    """0 in lanes below 0; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        zero = ir.Constant(VECTOR, None)
        return builder.select(builder.fcmp_ordered(">", zero, values[0]), zero, values[0])

    return vector(vector), generate


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    """The larger value in each lane; NaN if either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, b = values
        larger = builder.select(builder.fcmp_ordered(">", a, b), a, b)  # b where either is NaN
        return builder.select(builder.fcmp_unordered("uno", a, a), a, larger)

    return vector(vector, vector), generate


def _lanewise(operation: Any, method: str) -> None:
    """Define a Python operator on vectors."""

    @intrinsic
    def apply(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return getattr(builder, method)(*values)

        return vector(vector, vector), generate

    @overload(operation)
    def overloaded(a, b):
        if isinstance(a, VectorType) and isinstance(b, VectorType):
            return lambda a, b: apply(a, b)
        return None


_lanewise(operator.add, "fadd")
_lanewise(operator.sub, "fsub")
_lanewise(operator.mul, "fmul")
_lanewise(operator.truediv, "fdiv")


@intrinsic
def fetch_add(typing: Any, counter: Any) -> Any:
    """Atomically add 1 to counter[0] (int64) and return its old value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = cgutils.create_struct_proxy(signature.args[0])(context, builder, values[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(INDEX, 1), "monotonic")

    return types.int64(counter), generate


# -- partial vectors ---------------------------------------------------------------------------


@function
def load_lanes(array, at, lanes):
    """array[at : at + lanes] in the first lanes, zeros in the others; lanes ≤ LANES."""
    if lanes == LANES:
        return load(array, at)
    return masked_load(array, at, lanes)


@function
def store_lanes(array, at, value, lanes):
    """array[at : at + lanes] = the first lanes; lanes ≤ LANES."""
    if lanes == LANES:
        store(array, at, value)
    else:
        masked_store(array, at, value, lanes)


@function
def store_output(value, bias, residual, out, at, lanes, epilogue):
    """Add the bias, apply the `Epilogue`, and store in out[at : at + lanes]."""
    value = value + bias
    if epilogue.residual:
        value = value + load_lanes(residual, at, lanes)
    store_lanes(out, at, relu(value) if epilogue.relu else value, lanes)
