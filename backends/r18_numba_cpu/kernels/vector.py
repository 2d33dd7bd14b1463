"""Vectors of float32 as a Numba type, and the operations on them.

Arrays are float32, or bfloat16: uint16, whose bits are widened when loaded and rounded when stored.

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
from numba.extending import models, register_model

from r18_numba_cpu.kernels.arguments import RGB
from r18_numba_cpu.kernels.jit import function, overload

intrinsic: Any = extending.intrinsic

FEATURES = llvmlite.binding.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4
"""float32 lanes in a vector register of this machine."""

FLOAT, INDEX = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
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
    """A pointer to element `at` of a 1-d array."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.gep(data, [at])


def as_vector_pointer(builder: Any, pointer: Any) -> Any:
    return builder.bitcast(pointer, VECTOR.as_pointer())


@intrinsic
def load(typing: Any, array: Any, at: Any) -> Any:
    """The vector array[at : at + LANES]."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, alignment = _stored(signature.args[0])
        pointer = address(context, builder, signature.args[0], *values)
        pointer = builder.bitcast(pointer, kind.as_pointer())
        return _widened(builder, builder.load(pointer, align=alignment))

    return vector(array, types.int64), generate


@intrinsic
def store(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + LANES] = value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, alignment = _stored(signature.args[0])
        pointer = address(context, builder, signature.args[0], *values[:2])
        pointer = builder.bitcast(pointer, kind.as_pointer())
        builder.store(_narrowed(builder, values[2], kind), pointer, align=alignment)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), generate


def lane_mask(builder: Any, count: Any, lanes: int = LANES) -> Any:
    """The mask of the lanes below `count`."""
    numbers = ir.Constant(ir.VectorType(INDEX, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, splat(builder, count, lanes))


def splat(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """A vector with the scalar in every lane."""
    one = ir.VectorType(scalar.type, lanes)
    empty = ir.Constant(one, ir.Undefined)
    single = builder.insert_element(empty, scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(single, empty, zeros)


def load_first(builder: Any, pointer: Any, count: Any, kind: Any, alignment: int) -> Any:
    """The first `count` elements of a vector in memory, and zeros. Reads only those."""
    place = kind.as_pointer()
    mask = ir.VectorType(ir.IntType(1), kind.count)
    shape = ir.FunctionType(kind, [place, ir.IntType(32), mask, kind])
    name = f"llvm.masked.load.{_suffix(kind)}.p0{_suffix(kind)}"
    function = cgutils.get_or_insert_function(builder.module, shape, name)
    aligned = ir.Constant(ir.IntType(32), alignment)
    lanes = lane_mask(builder, count, kind.count)
    given = [builder.bitcast(pointer, place), aligned, lanes, ir.Constant(kind, None)]
    return builder.call(function, given)


def store_first(builder: Any, value: Any, pointer: Any, count: Any, alignment: int) -> None:
    """Store the first `count` elements of a vector. Writes only those."""
    kind, place = value.type, value.type.as_pointer()
    mask = ir.VectorType(ir.IntType(1), kind.count)
    shape = ir.FunctionType(ir.VoidType(), [kind, place, ir.IntType(32), mask])
    name = f"llvm.masked.store.{_suffix(kind)}.p0{_suffix(kind)}"
    function = cgutils.get_or_insert_function(builder.module, shape, name)
    aligned = ir.Constant(ir.IntType(32), alignment)
    lanes = lane_mask(builder, count, kind.count)
    builder.call(function, [value, builder.bitcast(pointer, place), aligned, lanes])


@intrinsic
def masked_load(typing: Any, array: Any, at: Any, count: Any) -> Any:
    """array[at : at + count] in the first `count` lanes, zeros in the others. Reads only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, alignment = _stored(signature.args[0])
        pointer = address(context, builder, signature.args[0], *values[:2])
        return _widened(builder, load_first(builder, pointer, values[2], kind, alignment))

    return vector(array, types.int64, types.int64), generate


@intrinsic
def masked_store(typing: Any, array: Any, at: Any, value: Any, count: Any) -> Any:
    """array[at : at + count] = the first `count` lanes. Writes only those."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind, alignment = _stored(signature.args[0])
        pointer = address(context, builder, signature.args[0], *values[:2])
        store_first(builder, _narrowed(builder, values[2], kind), pointer, values[3], alignment)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector, types.int64), generate


# -- bfloat16 ----------------------------------------------------------------------------------

HALVES = ir.VectorType(ir.IntType(16), LANES)
"""The bits of LANES bfloat16: the upper halves of float32."""
BITS = ir.VectorType(ir.IntType(32), LANES)
QUIET = 0x40
"""The bit of a bfloat16 that makes a NaN quiet, so that none becomes an infinity."""


def _stored(array: Any) -> tuple[Any, int]:
    """The type of LANES elements of an array in memory, and their alignment in bytes."""
    return (HALVES, 2) if array.dtype == types.uint16 else (VECTOR, FLOAT_ALIGNMENT)


def _suffix(kind: Any) -> str:
    """The name of a type in those of LLVM's intrinsics."""
    element = kind.element
    return f"v{kind.count}" + ("f32" if element == FLOAT else f"i{element.width}")


def _constant(value: int) -> Any:
    return ir.Constant(BITS, [value] * LANES)


def widen(builder: Any, halves: Any) -> Any:
    """bfloat16 as float32: exact."""
    bits = builder.shl(builder.zext(halves, BITS), _constant(16))
    return builder.bitcast(bits, VECTOR)


def narrow(builder: Any, value: Any) -> Any:
    """float32 rounded to bfloat16: to the nearest, ties to even, and subnormals are kept.

    The upper half of the bits, plus one where the lower half is more than half a unit, or half of
    one and the upper is odd: a carry out of bits + 0x7fff + odd. Beyond the largest number, it
    makes an infinity.
    """
    bits = builder.bitcast(value, BITS)
    upper = builder.lshr(bits, _constant(16))
    odd = builder.and_(upper, _constant(1))
    carried = builder.add(bits, builder.add(odd, _constant(0x7FFF)))
    rounded = builder.lshr(carried, _constant(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, builder.or_(upper, _constant(QUIET)), rounded)
    return builder.trunc(chosen, HALVES)


def _widened(builder: Any, found: Any) -> Any:
    return widen(builder, found) if found.type == HALVES else found


def _narrowed(builder: Any, value: Any, kind: Any) -> Any:
    return narrow(builder, value) if kind == HALVES else value


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


def lanewise(operation: Any, method: str, kind: types.Type) -> None:
    """Define a Python operator on two vectors of a Numba type, by a method of LLVM's builder."""

    @intrinsic
    def apply(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return getattr(builder, method)(*values)

        return kind(kind, kind), generate

    @overload(operation)
    def overloaded(a, b):
        if a == kind and b == kind:
            return lambda a, b: apply(a, b)
        return None


lanewise(operator.add, "fadd", vector)
lanewise(operator.sub, "fsub", vector)
lanewise(operator.mul, "fmul", vector)
lanewise(operator.truediv, "fdiv", vector)


@intrinsic
def copy_run(typing: Any, array: Any, source: Any, out: Any, to: Any, count: Any) -> Any:
    """out[to : to + count] = array[source : source + count], of one type; they may not overlap.

    Assigning a slice would allocate, for arrays that do.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        read = address(context, builder, signature.args[0], *values[:2])
        written = address(context, builder, signature.args[2], *values[2:4])
        cgutils.raw_memcpy(builder, written, read, values[4], out.dtype.bitwidth // 8)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(array, i64, out, i64, i64), generate


@intrinsic
def move_run(typing: Any, array: Any, source: Any, to: Any, count: Any) -> Any:
    """array[to : to + count] = array[source : source + count] as it was; they may overlap."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        read = address(context, builder, signature.args[0], *values[:2])
        written = address(context, builder, signature.args[0], values[0], values[2])
        cgutils.raw_memmove(builder, written, read, values[3], array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, types.int64), generate


def shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of two vectors, those of the second counted on from the first's."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def woven_part(builder: Any, planes: Any, part: int, size: int = 1) -> Any:
    """Lanes part·LANES … (part + 1)·LANES − 1 of r₀g₀b₀r₁g₁b₁…, of three planes of LANES lanes.

    size: the lanes of an element.
    """
    both = list(range(2 * LANES))
    two = shuffled(builder, planes[0], planes[1], both)
    third = shuffled(builder, planes[2], ir.Constant(planes[2].type, None), both)
    sources = []  # a lane, of a plane
    for at in range(part * LANES, (part + 1) * LANES):
        element, lane = divmod(at, size)
        pixel, plane = divmod(element, RGB)
        sources.append(plane * LANES + pixel * size + lane)
    return shuffled(builder, two, third, sources)


@intrinsic
def weave(typing: Any, x: Any, red: Any, green: Any, blue: Any, out: Any, to: Any) -> Any:
    """out[to : to + 3·LANES] = r₀g₀b₀r₁g₁b₁…, of LANES elements of x from each of three on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        one = FLOAT if x.dtype == types.float32 else ir.IntType(x.dtype.bitwidth)
        vectors, nbytes = ir.VectorType(one, LANES).as_pointer(), x.dtype.bitwidth // 8
        planes = []
        for at in values[1:4]:
            place = address(context, builder, x, values[0], at)
            planes.append(builder.load(builder.bitcast(place, vectors), align=nbytes))
        first = address(context, builder, out, *values[4:])
        for part in range(RGB):
            place = builder.gep(first, [ir.Constant(INDEX, part * LANES)])
            pixels = woven_part(builder, planes, part)
            builder.store(pixels, builder.bitcast(place, vectors), align=nbytes)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(x, i64, i64, i64, out, i64), generate


@function
def interleave(x, source, plane, channels, count, out, to):
    """out[to + C·p + c] = x[source + c·plane + p] for p < `count` and c < C = `channels`.

    Elements are of one type. Three channels a vector at a time: LLVM would store each element.
    """
    whole = count - count % LANES if channels == RGB else 0
    for p in range(0, whole, LANES):
        red = source + p
        weave(x, red, red + plane, red + 2 * plane, out, to + RGB * p)
    for c in range(channels):
        for p in range(whole, count):
            out[to + channels * p + c] = x[source + c * plane + p]


@intrinsic
def fetch_add(typing: Any, counters: Any, at: Any) -> Any:
    """Atomically add 1 to counters[at] (int64) and return its old value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = address(context, builder, signature.args[0], *values)
        return builder.atomic_rmw("add", place, ir.Constant(INDEX, 1), "monotonic")

    return types.int64(counters, types.int64), generate


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


def put_run(x, source, scratch, to, count):
    """scratch[to : to + count] = x[source : source + count], in the type of scratch."""
    raise NotImplementedError("compiled only")


@overload(put_run)
def _put_run(x, source, scratch, to, count):
    if scratch.dtype == x.dtype:
        return lambda x, source, scratch, to, count: copy_run(x, source, scratch, to, count)

    def widened(x, source, scratch, to, count):
        for at in range(0, count, LANES):
            lanes = min(LANES, count - at)
            store_lanes(scratch, to + at, load_lanes(x, source + at, lanes), lanes)

    return widened
