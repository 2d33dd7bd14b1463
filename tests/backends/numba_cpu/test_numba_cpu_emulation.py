"""`R18_NUMBA_CPU_EMULATE`: instructions that this CPU lacks, in processes of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from r18.errors import BackendUnavailable
from r18_numba_cpu import emulation
from r18_numba_cpu.kernels import amx
from r18_numba_cpu.kernels.emulated import EmulatedTiles
from support import output_of

PROGRAM = """
import json
from r18_numba_cpu import Backend

backend = Backend()
simulates = backend.simulates()
device = backend.probe()
endings = {ending: any(k.algorithm.endswith(ending) for k in backend.kernels())
           for ending in ("_amx", "_vnni")}
print(json.dumps([simulates, device.simulated, str(device), dict(device.details), endings]))
"""

OF_BYTES = """
import ctypes
import numpy as np
from llvmlite import binding, ir
from r18_numba_cpu.kernels.emulated import add_bytes

lanes = 4
word, octet = ir.IntType(32), ir.IntType(8)
kinds = ir.VectorType(word, lanes), ir.VectorType(octet, 4 * lanes)
module = ir.Module()
pointers = [kind.as_pointer() for kind in (kinds[0], kinds[1], kinds[1])]
function = ir.Function(module, ir.FunctionType(ir.VoidType(), pointers), "dot")
builder = ir.IRBuilder(function.append_basic_block())
sums, a, b = [builder.load(one, align=1, typ=one.type.pointee) for one in function.args]
builder.store(add_bytes(builder, sums, a, b), function.args[0], align=1)
builder.ret_void()

binding.initialize_native_target()
binding.initialize_native_asmprinter()
machine = binding.Target.from_default_triple().create_target_machine()
engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
engine.finalize_object()
call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(engine.get_function_address("dot"))
rng = np.random.default_rng(0)
for extreme in (False, True):
    sums = rng.integers(-(2**31), 2**31, lanes).astype(np.int32)
    a = rng.integers(0, 256, 4 * lanes).astype(np.uint8)
    b = rng.integers(-128, 128, 4 * lanes).astype(np.int8)
    if extreme:
        a[:], b[:] = 255, -128
    products = a.astype(np.int64) * b
    expected = (sums + products.reshape(lanes, 4).sum(1)).astype(np.int32)
    found = sums.copy()
    call(found.ctypes.data, a.ctypes.data, b.ctypes.data)
    assert np.array_equal(found, expected), (found, expected)
print("right")
"""


def described(names: str) -> Any:
    return json.loads(output_of(PROGRAM, env={emulation.VARIABLE: names}))


def test_a_name_that_is_not_known_says_which_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emulation.VARIABLE, "vnni, mmx,")
    with pytest.raises(BackendUnavailable, match="names 'mmx'; known: amx, vnni"):
        emulation.requested()


def test_names_are_sorted_and_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emulation.VARIABLE, " vnni,amx,")
    assert emulation.requested() == ("amx", "vnni")
    monkeypatch.delenv(emulation.VARIABLE)
    assert emulation.requested() == ()


def test_both_kinds_of_tiles_have_the_same_instructions() -> None:
    def instructions(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert instructions(EmulatedTiles) == instructions(amx.Instructions)


def test_emulated_instructions_bring_their_kernels_and_count_as_simulated() -> None:
    if amx.PRESENT:
        pytest.skip("this CPU has AMX, and nothing is emulated")
    simulates, simulated, name, details, kernels = described("amx,vnni")
    assert simulates
    assert simulated
    assert "emulated" in name
    assert details["amx"] == "emulated"
    assert details["amx_bf16"] == "yes"
    assert kernels["_amx"]


def test_without_a_request_nothing_is_emulated() -> None:
    simulates, simulated, name, details, _ = described("")
    assert not simulates
    assert not simulated
    assert "emulated" not in {name, *details.values()}


def test_emulated_dots_of_bytes_are_exact_and_wrap() -> None:
    assert output_of(OF_BYTES) == "right"
