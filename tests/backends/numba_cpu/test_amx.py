"""AMX: what Linux answers, the sizes of tiles, and the instructions that LLVM selects.

`test_numba_cpu_integers.py` has the results, from emulated instructions where the CPU has none.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from r18_numba_cpu import Backend, compiled
from r18_numba_cpu.integers import gemm, tiles
from r18_numba_cpu.integers.packing import AMX
from r18_numba_cpu.kernels.arguments import ConvShape
from support import output_of

amx = compiled.module("amx")

# -- permission --------------------------------------------------------------------------------


def answering(value: int) -> tuple[list[tuple[int, ...]], Callable[..., Any]]:
    """A C library whose system calls return the value, and a list of their arguments."""
    seen: list[tuple[int, ...]] = []

    class Library:
        def __init__(self, *_: Any, **__: Any) -> None:
            def syscall(*arguments: ctypes.c_long) -> int:
                seen.append(tuple(argument.value for argument in arguments))
                ctypes.set_errno(errno.EPERM)
                return value

            self.syscall = syscall

    return seen, Library


@pytest.mark.parametrize(("value", "said"), [(0, ""), (-1, "arch_prctl: Operation not permitted")])
def test_linux_is_asked_for_tiles(value: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, library = answering(value)
    monkeypatch.setattr(amx.ctypes, "CDLL", library)
    monkeypatch.setattr(amx.sys, "platform", "linux")
    assert amx.refusal() == said
    assert seen == [(158, 0x1023, 18)]


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx.sys, "platform", "darwin")
    assert amx.refusal() == f"no permission on {platform.system()}"


@pytest.mark.parametrize(
    ("available", "refusal", "name", "detail"),
    [
        (True, "", ", AMX", "yes"),
        (False, "", "", "no"),
        (False, "arch_prctl: No", ", no AMX (arch_prctl: No)", "no: arch_prctl: No"),
    ],
)
def test_a_backend_says_whether_it_has_tiles(
    available: bool, refusal: str, name: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "AVAILABLE", available)
    monkeypatch.setattr(amx, "REFUSAL", refusal)
    monkeypatch.setattr(amx, "HAS_BFLOAT16", True)
    backend = Backend()
    info = backend.probe()
    assert info.name.endswith(f"VNNI{name}")
    assert info.details["amx"] == detail
    assert info.details["amx_bf16"] == ("yes" if available else "no")
    listed = [kernel.id for kernel in backend.kernels() if "_amx" in kernel.id]
    assert listed == available * [
        "numba-cpu/conv2d/implicit_gemm_amx/bf16",
        "numba-cpu/conv2d/implicit_gemm_amx/bf16/from_nchw",
        "numba-cpu/conv2d_maxpool2d/implicit_gemm_amx/bf16",
        "numba-cpu/conv2d_maxpool2d/implicit_gemm_amx/bf16/from_nchw",
        "numba-cpu/linear/tiled_amx/bf16",
        "numba-cpu/qconv2d/implicit_gemm_amx/int8",
        "numba-cpu/qconv2d_maxpool2d/implicit_gemm_amx/int8/from_nchw",
        "numba-cpu/qlinear/tiled_amx/int8",
    ]


# -- sizes -------------------------------------------------------------------------------------


def test_steps_of_k_are_even_and_whole_groups() -> None:
    for length in range(1, 3000):
        step = tiles.step(length)
        assert step % 4 == 0
        assert 4 <= step <= 64
        assert 0 <= tiles.padded(length) - length < 64
        assert tiles.padded(length) % step == 0
        assert tiles.padded(length) // step == -(-length // 64)  # no more steps than needed


def shapes() -> list[ConvShape]:
    found = []
    for kernel, stride, channels in product(
        product((1, 3), (1, 2, 3)), product((1, 2, 3), (1, 2)), (1, 5, 64)
    ):
        for width, height in product((1, 2, 7, 15, 16, 17, 33, 56), (1, 4)):
            extents = (
                1,
                channels,
                (height - 1) * stride[0] + kernel[0],
                (width - 1) * stride[1] + kernel[1],
            )
            found.append(ConvShape(*extents, 3, height, width, *kernel, *stride, 0, 0))
    return found


def test_tiles_cover_each_output_once_and_stay_in_their_slot() -> None:
    for shape, rows in product(shapes(), (1, 3, 4)):
        if rows > shape.out_h:
            continue
        cover = tiles.cover(shape, rows, False)
        width = (shape.out_w - 1) * shape.stride_w + shape.kernel_w
        lines = rows if cover.merged else 1
        outputs = (lines - 1) * cover.pitch + shape.out_w
        each = -(-outputs // cover.height)
        apart = rows * -(-shape.out_w // 16)
        assert each * (rows // lines) <= apart, shape
        assert 1 <= cover.height <= 16
        if cover.merged:  # the distance of two rows, in outputs
            assert cover.pitch * shape.stride_w == shape.stride_h * width
            assert cover.pitch >= shape.out_w
        places = tiles.places(shape, rows, cover)
        assert len(places) == each * (rows // lines) * cover.height
        assert [p for p in places if p >= 0] == list(range(rows * shape.out_w)), shape
        # The last byte that the last row of the last tile reads.
        start = (rows - lines) * shape.stride_h * width * shape.channels
        last = start + (each * cover.height - 1) * shape.stride_w * shape.channels
        last += (shape.kernel_h - 1) * width * shape.channels
        last += tiles.padded(shape.kernel_w * shape.channels)
        seen = ((rows - 1) * shape.stride_h + shape.kernel_h) * width * shape.channels
        assert last <= seen + tiles.beyond(shape, rows, cover), shape


def test_a_place_is_the_output_that_its_row_reads() -> None:
    """Of a band of fewer rows, too: its tiles begin with the same places."""
    for shape, rows in product(shapes(), (1, 3, 4)):
        if rows > shape.out_h:
            continue
        cover = tiles.cover(shape, shape.out_h, False)
        width = (shape.out_w - 1) * shape.stride_w + shape.kernel_w
        lines = rows if cover.merged else 1
        each = -(-((lines - 1) * cover.pitch + shape.out_w) // cover.height)
        places = tiles.places(shape, shape.out_h, cover)
        found = {}
        for tile, row in product(range(each * (rows // lines)), range(cover.height)):
            place = places[tile * cover.height + row]
            if 0 <= place < rows * shape.out_w:  # as `store_places` has it
                line, column = tile // each, tile % each * cover.height + row
                found[place] = line * shape.stride_h * width + column * shape.stride_w
        assert found == {
            line * shape.out_w + column: line * shape.stride_h * width + column * shape.stride_w
            for line, column in product(range(rows), range(shape.out_w))
        }, shape


def test_bands_have_room_for_what_tiles_read() -> None:
    for shape in shapes():
        cut = gemm.blocks(shape, 2, AMX)
        width = (shape.out_w - 1) * shape.stride_w + shape.kernel_w
        seen = ((cut.rows - 1) * shape.stride_h + shape.kernel_h) * width * shape.channels
        beyond = tiles.beyond(shape, cut.rows, tiles.cover(shape, cut.rows, True))
        assert cut.band >= seen
        before = compiled.module("micro_kernel").ROWS * compiled.module("micro_kernel").COLUMNS
        assert cut.slot >= before + (cut.samples - 1) * cut.band + seen + beyond


def test_a_configuration_is_one_that_the_cpu_loads() -> None:
    """Configurations are valid; `ldtilecfg` and `tdpbusd` raise #GP and #UD for others."""
    for shape in shapes():
        cover = tiles.cover(shape, shape.out_h, False)
        content = np.array(tiles.configuration(cover), np.int64).view(np.uint8)
        assert content.size == 64
        assert content[0] == 1  # the palette
        nbytes, rows = content[16:32].view(np.uint16), content[48:56]
        assert not content[1:16].any()
        assert not content[32:48].any()
        assert not content[56:].any()
        assert nbytes.min() >= 4
        assert rows.min() >= 1
        assert nbytes.max() <= 64
        assert rows.max() <= 16
        for c, (a, b) in enumerate(product((4, 5), (6, 7))):
            assert rows[c] == rows[a]
            assert nbytes[c] == nbytes[b]
            assert nbytes[a] == 4 * rows[b]


# -- stacked rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "channels", "stride", "rows"),
    [
        ((7, 7), 3, 2, 2),  # 4 steps of 42 bytes, not 7 of 21
        ((7, 7), 3, 1, 1),
        ((7, 7), 3, 3, 1),
        ((3, 3), 3, 2, 2),
        ((1, 7), 3, 2, 1),
        ((2, 4), 8, 2, 2),  # a step of 64, not two of 32
        ((2, 4), 9, 2, 1),  # two steps of 36 either way
        ((3, 3), 64, 2, 1),  # 2·6 steps, not 3·3
    ],
)
def test_rows_are_stacked_where_that_takes_fewer_steps(
    kernel: tuple[int, int], channels: int, stride: int, rows: int
) -> None:
    assert tiles.stack(*kernel, channels, stride) == rows


@pytest.mark.parametrize(("size", "pad"), list(product((2, 3, 7), range(4))))
def test_a_window_begins_with_a_stack(size: int, pad: int) -> None:
    shape = ConvShape(1, 3, 33, 31, 8, 15, 15, size, 5, 2, 1, pad, 1)
    assert tiles.stacked(shape, 1) == (shape, 0)
    found, shift = tiles.stacked(shape, 2)
    assert (found.channels, found.stride_h, found.height) == (6, 1, 33)
    for row in range(shape.out_h):
        first = 2 * (row - found.pad_h) + shift
        assert first == 2 * row - pad
        assert first + size <= first + 2 * found.kernel_h <= first + size + 1


# -- code --------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="LLVM here has no x86")
def test_llvm_selects_the_instructions_and_spills_nothing() -> None:
    """LLVM, for a Sapphire Rapids, selects AMX instructions and spills nothing. Not run."""
    assembly = output_of("""
import llvmlite.binding as binding
found = binding.get_host_cpu_features()
wanted = ("amx-tile", "amx-int8", "avx2", "fma", "bmi", "bmi2", "avx512f", "avx512bw",
          "avx512cd", "avx512dq", "avx512vl", "avx512vnni")
found.update(dict.fromkeys(wanted, True))
binding.get_host_cpu_features = lambda: found
binding.get_host_cpu_name = lambda: "sapphirerapids"

import numpy as np
from r18_numba_cpu import compiled

kernel = compiled.module("integers.implicit_gemm").implicit_gemm
kinds = "uint8 int32 int32 float32 uint8 float32 uint8 int32 uint8 int64"
arrays = [np.zeros(1, kind) for kind in kinds.split()]
print(compiled.module("jit").assembly(kernel, (*arrays, np.zeros(8, np.int64))))
""")

    assembly = re.sub(r"[ \t]*#.*", "", assembly)  # comments name instructions, too

    def count(pattern: str, text: str) -> int:
        return len(re.findall(pattern, text))

    assert count(r"\tldtilecfg\t", assembly) == 1  # once a panel
    assert count(r"\ttilerelease", assembly) == 1
    assert count(r"\ttilestored\t", assembly) == 4
    # A step over K has no jump, and none leads into it.
    stretches = re.split(r"^(?:\.LBB\w+:|\tj\w+\t.*)", assembly, flags=re.MULTILINE)
    kinds = set()
    for step in (stretch for stretch in stretches if "tdpb" in stretch):
        products = re.findall(r"\t(tdpb\wsd)\t%tmm(\d), %tmm(\d), %tmm(\d)", step)
        # AT&T's order: B, A, C. Each tile that is loaded serves all its products.
        order = [(int(c), int(a), int(b)) for _, b, a, c in products]
        one, two = [(0, 4, 6), (1, 4, 7)], [(0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)]
        each = two if two[2] in order else one
        assert order == each * (len(order) // len(each))
        assert count(r"\ttileloadd\t", step) == len(order) // len(each) * (2 + len(each) // 2)
        kinds.add((products[0][0], len(each)))
        assert len({name for name, *_ in products}) == 1
        assert "mm" not in re.sub("%tmm", "", step)  # no vector
        assert not count(
            r"\tmov\w*\t%\w+, \S*\(%rsp\)", step
        )  # no spill; LLVM may reload addresses
    assert kinds == set(product(("tdpbusd", "tdpbssd"), (2, 4)))
