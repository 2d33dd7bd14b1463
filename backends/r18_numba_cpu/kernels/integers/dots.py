"""The instructions that add products of neighbouring integers to the int32 lanes of a register.

`VNNI`   `vpdpbusd` adds four products of uint8 and int8 to each lane.
`WORDS`  `vpmaddwd` adds two products of int16 to each other, `vpaddd` adds them to the lane. VNNI
         has one instruction for both, `vpdpwssd`.

None of them saturates on bytes and on bytes in int16: the sums are exact modulo 2³², and so is
whatever is added to them. A sum that int32 holds is right at its end, whatever it was on the way.
NOTE: `vpmaddubsw`, AVX2's product of bytes, does saturate: 2·255·127 is beyond int16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from r18_numba_cpu import emulation
from r18_numba_cpu.kernels import emulated
from r18_numba_cpu.kernels.integers.bytes import BYTE
from r18_numba_cpu.kernels.integers.requantize import INTEGERS
from r18_numba_cpu.kernels.vector import FEATURES, LANES

HAS_WORDS = bool(FEATURES.get("avx512bw") if LANES == 16 else FEATURES.get("avx2"))
PRESENT = bool(
    FEATURES.get("avx512vnni") and FEATURES.get("avx512vl")
    if LANES == 16
    else FEATURES.get("avxvnni")
)
"""Whether the CPU has `vpdpbusd` for its registers."""
EMULATED = "vnni" in emulation.requested() and not PRESENT
HAS_VNNI = HAS_WORDS and (PRESENT or EMULATED)

BYTES_TYPED = llvmlite.binding.llvm_version_info >= (22,)
"""Whether LLVM declares the factors of `vpdpbusd` as bytes, as they are (llvm-project #97271), and
not as int32. Releases that were changed before 22 accept the old types as well."""


@dataclass(frozen=True)
class Dot:
    """The multiply-accumulate instruction of a register tile.

    group:   elements of K that a lane multiplies at a time: 32 bits of them.
    factors: a register of A, or of B.
    add:     (builder, sums, a, b): the sums with the products of a and b.
    """

    group: int
    factors: Any
    add: Callable[[Any, Any, Any, Any], Any]


def _add_bytes(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    if EMULATED:
        return emulated.add_bytes(builder, sums, a, b)
    kind = ir.FunctionType(INTEGERS, [INTEGERS, a.type, b.type])
    name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
    dot = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(dot, [sums, a, b])


def _add_words(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    """The sums with the products of int16.

    NOTE: inline assembly keeps `vpdpwssd` whole. On CPUs whose sums wait longer for it than for
    `vpaddd`, such as an Emerald Rapids, LLVM makes two instructions of the intrinsic. That shortens
    the chain of a sum, but the sums of a tile do not wait for each other.
    """
    if PRESENT and LANES == 16:
        llvmlite.binding.initialize_native_asmparser()  # Numba does not, and LLVM would crash
        kind = ir.FunctionType(INTEGERS, [INTEGERS, a.type, b.type])
        return builder.asm(kind, "vpdpwssd $3, $2, $0", "=v,0,v,v", [sums, a, b], side_effect=False)
    kind = ir.FunctionType(INTEGERS, [a.type, b.type])
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    multiply = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.add(sums, builder.call(multiply, [a, b]))


VNNI = Dot(4, ir.VectorType(BYTE, 4 * LANES) if BYTES_TYPED else INTEGERS, _add_bytes)
WORDS = Dot(2, ir.VectorType(ir.IntType(16), 2 * LANES), _add_words)

BY_ELEMENT = {types.uint8: VNNI, types.uint16: WORDS}
"""The instruction by the elements of a band of A."""

__all__ = ["BY_ELEMENT", "HAS_VNNI", "HAS_WORDS", "VNNI", "WORDS", "Dot"]
