"""Functions to check: right ones, ones with another arithmetic, and wrong ones.

Sums compute `x @ w` product by product in NumPy, so that every rounding is what the name
says. `r18 check tests/checked_kernels.py:NAME` judges any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn import functional as F

Array = np.ndarray[Any, np.dtype[Any]]

# -- factors -----------------------------------------------------------------------------------


def to_tf32(a: Array) -> Array:
    """The array rounded to 11 bits, ties to even."""
    bits = a.astype(np.float32).view(np.uint32)
    bits = bits + 0x0FFF + ((bits >> 13) & 1)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def cut_to_tf32(a: Array) -> Array:
    """The array truncated to 11 bits, as tensor cores truncate float32 operands."""
    return (a.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def to_half(a: Array) -> Array:
    return a.astype(np.float16).astype(np.float32)


def to_bfloat16(a: Array) -> Array:
    return a.astype(ml_dtypes.bfloat16).astype(np.float32)


def matmul_tf32(a: Array, b: Array) -> Array:
    return to_tf32(a) @ to_tf32(b)


def matmul_tf32_cut(a: Array, b: Array) -> Array:
    return cut_to_tf32(a) @ cut_to_tf32(b)


def matmul_half_factors(a: Array, b: Array) -> Array:
    return to_half(a) @ to_half(b)


def matmul_bfloat16_factors(a: Array, b: Array) -> Array:
    return to_bfloat16(a) @ to_bfloat16(b)


def matmul_tf32_weights(a: Array, b: Array) -> Array:
    """A product whose second factor alone is rounded to tf32."""
    return a @ to_tf32(b)


def matmul_3xtf32(a: Array, b: Array) -> Array:
    """Split products: each factor is two 11-bit numbers, without the product of the low parts."""
    ah, bh = to_tf32(a), to_tf32(b)
    al, bl = to_tf32(a - ah), to_tf32(b - bh)
    return ah @ bh + (ah @ bl + al @ bh)


# -- sums --------------------------------------------------------------------------------------

Add = Callable[[Array, Array], Array]


def cut(wide: Array, bits: int = 24) -> Array:
    """A float64 truncated to `bits` bits, as float32."""
    mantissa, exponent = np.frexp(wide)
    return np.ldexp(np.trunc(np.ldexp(mantissa, bits)), exponent - bits).astype(np.float32)


def _one_by_one(a: Array, b: Array, add: Add, dtype: Any) -> Array:
    sums = np.zeros((len(a), b.shape[1]), dtype)
    for k in range(a.shape[1]):
        sums = add(sums, a[:, k, None] * b[k])
    return sums


def matmul_sequential(a: Array, b: Array) -> Array:
    return _one_by_one(a, b, lambda s, t: s + t, a.dtype)


def matmul_half_sums(a: Array, b: Array) -> Array:
    """A product with each sum rounded to float16."""
    sums = _one_by_one(a, b, lambda s, t: to_half(s + t), np.float32)
    return sums.astype(a.dtype)


def matmul_bfloat16_sums(a: Array, b: Array) -> Array:
    return _one_by_one(a, b, lambda s, t: to_bfloat16(s + t), np.float32)


def matmul_cut_sums(a: Array, b: Array) -> Array:
    """A product with each sum truncated to the 24 bits of float32."""

    def add(sums: Array, products: Array) -> Array:
        return cut(sums.astype(np.float64) + products.astype(np.float64))

    return _one_by_one(a, b, add, np.float32)


def matmul_pairwise(a: Array, b: Array) -> Array:
    terms = list(np.moveaxis(a[:, :, None] * b, 1, 0))
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        terms = [x + y for x, y in zip(terms[::2], terms[1::2], strict=False)] + odd
    return np.ascontiguousarray(terms[0])


def matmul_double_sums(a: Array, b: Array) -> Array:
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype)


def matmul_rounded_products(a: Array, b: Array) -> Array:
    """An accumulator in float64 of products in the arrays' format, as `s += a[i] * b[i]` has it."""
    return (a[:, :, None] * b).sum(axis=1, dtype=np.float64).astype(a.dtype)


def matmul_tensor_core(a: Array, b: Array) -> Array:
    """tf32 in steps of eight: terms aligned to the largest, truncated below its 24th bit."""
    x, y = cut_to_tf32(a).astype(np.float64), cut_to_tf32(b).astype(np.float64)
    sums = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(0, a.shape[1], 8):
        terms = np.moveaxis(x[:, k : k + 8, None] * y[k : k + 8], 1, 0)
        terms = np.concatenate([sums[None].astype(np.float64), terms])
        last = np.frexp(np.abs(terms).max(axis=0))[1] - 24
        sums = cut(np.trunc(np.ldexp(terms, -last)).sum(axis=0) * np.ldexp(1.0, last))
    return sums


def matmul_split_in_half(a: Array, b: Array) -> Array:
    """Parts of 256 products each, stored in float16 before they are added: split-K."""
    sums = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(0, a.shape[1], 256):
        sums = to_half(sums + to_half(a[:, k : k + 256] @ b[k : k + 256]))
    return sums


# -- right kernels -----------------------------------------------------------------------------


def _two(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def einsum_conv2d(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """NumPy's einsum over windows."""
    (sh, sw), (ph, pw) = _two(stride), _two(padding)
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = sliding_window_view(padded, w.shape[2:], axis=(2, 3))[:, :, ::sh, ::sw]
    y = np.einsum("nchwrs,ocrs->nohw", windows, w, optimize=True)
    return y if b is None else y + b[:, None, None]


def conv2d(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    return F.conv2d(x, w, b, stride, padding)


def softmax_of_another_base(x: Array, dim: int = -1) -> Array:
    """Its powers are of e^1.0002 and not of e."""
    y = np.exp((x - x.max(axis=1, keepdims=True)) * np.float32(1.0002))
    return y / y.sum(axis=1, keepdims=True)


def numpy_softmax(x: Array) -> Array:
    y = np.exp(x - x.max(axis=1, keepdims=True))
    return y / y.sum(axis=1, keepdims=True)


def batch_norm(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """BatchNorm as its formula is written; PyTorch computes x·scale + shift."""
    mean, var, weight, bias = (a[:, None, None] for a in (mean, var, weight, bias))
    return (x - mean) / torch.sqrt(var + eps) * weight + bias


# -- wrong kernels -----------------------------------------------------------------------------


def conv2d_zeros(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    return torch.zeros_like(F.conv2d(x, w, b, stride, padding))


def conv2d_last_halo_row(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    """A convolution whose padding below the image reads as ones instead of zeros."""
    ph, pw = _two(padding)
    image = F.pad(F.pad(x, (pw, pw, ph, 0)), (0, 0, 0, ph), value=1.0)
    return F.conv2d(image, w, b, stride)


_kept: dict[Any, Any] = {}


def conv2d_cached_by_id(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    key = id(x), id(w), stride, padding
    if key not in _kept:
        _kept[key] = F.conv2d(x, w, b, stride, padding)
    return _kept[key]


_outputs: dict[Any, Any] = {}


def conv2d_stale(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    """Computes once for each shape, and returns that result from then on."""
    key = x.shape, w.shape, b is None, stride, padding
    if key not in _outputs:
        _outputs[key] = F.conv2d(x, w, b, stride, padding)
    return _outputs[key]


def conv2d_unwritten(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    """Writes every output but the last row of each channel."""
    y = F.conv2d(x, w, b, stride, padding)
    out = torch.empty_like(y)
    out[:, :, : max(1, y.shape[2] - 1)] = y[:, :, : max(1, y.shape[2] - 1)]
    return out


def conv2d_of_one_shape(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0) -> Any:
    """A convolution of the first 7 rows, which is right for images of 7 rows."""
    return F.conv2d(x[:, :, :7], w, b, stride, padding)


def relu_in_place(x: Any) -> Any:
    return x.relu_()


_results: dict[Any, Array] = {}


def add_in_one_buffer(a: Array, b: Array) -> Array:
    """Returns the same memory for each call of a shape."""
    return np.add(a, b, out=_results.setdefault(a.shape, np.empty_like(a)))


def relu_that_ignores_errors(x: Array) -> Array:
    np.seterr(all="ignore")
    return x.clip(0)


def relu_into_a_view(out: Array, x: Array) -> Array:
    """Right: writes `out` and returns a view of it."""
    np.maximum(x, 0, out=out)
    return out[...]


def matmul_reads_on(a: Array, b: Array) -> Array:
    """Reads one element past the end of its first argument."""
    past = np.lib.stride_tricks.as_strided(a.reshape(-1)[-1:], (17,), (a.itemsize,))
    past.sum()
    return a @ b


def crashes(a: Array, b: Array) -> Array:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSEGV)
    return a @ b


# -- functions that do not take everything ---------------------------------------------------------


def of_eight(a: Array, b: Array) -> Array:
    assert not_of_eight(a.shape, b.shape) is None, a.shape
    return matmul_sequential(a, b)  # BLAS may have an order that depends on the row


def of_eight_tf32(a: Array, b: Array) -> Array:
    assert not_of_eight(a.shape, b.shape) is None, a.shape
    return matmul_sequential(to_tf32(a), to_tf32(b))


def not_of_eight(a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    return "no multiple of 8" if a[1] % 8 or b[1] % 8 else None


def more_than_fifteen(a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    return "more than 15 columns" if b[1] > 15 else None


def more_than_sixteen(a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    return "more than 16 rows or columns" if max(a[0], b[1]) > 16 else None


def longer_than_100(a: tuple[int, ...], b: tuple[int, ...]) -> str | None:
    return "more than 100 terms" if a[1] > 100 else None


# -- transforms --------------------------------------------------------------------------------


def winograd_conv2d(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """F(2×2, 3×3) for 3×3 windows of stride 1, einsum for others."""
    if w.shape[2:] != (3, 3) or _two(stride) != (1, 1):
        return einsum_conv2d(x, w, b, stride, padding)
    bt = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], x.dtype)
    g = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], x.dtype)
    at = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], x.dtype)
    ph, pw = _two(padding)
    oh, ow = x.shape[2] + 2 * ph - 2, x.shape[3] + 2 * pw - 2
    image = np.pad(x, ((0, 0), (0, 0), (ph, ph + oh % 2), (pw, pw + ow % 2)))
    tiles = sliding_window_view(image, (4, 4), axis=(2, 3))[:, :, ::2, ::2]
    d = np.einsum("ij,nchwjk,lk->nchwil", bt, tiles, bt)
    u = np.einsum("ij,ocjk,lk->ocil", g, w, g)
    m = np.einsum("nchwil,ocil->nohwil", d, u)
    y = np.einsum("ij,nohwjk,lk->nohiwl", at, m, at)
    y = y.reshape(*y.shape[:2], y.shape[2] * 2, y.shape[4] * 2)[:, :, :oh, :ow]
    return np.ascontiguousarray(y if b is None else y + b[:, None, None])


def fft_conv2d(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """FFTs of powers of two for windows of stride 1, einsum for all others."""
    return _by_fft(x, w, b, stride, padding, 0)


def fft_wrapped(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """FFTs one column too short for 2ⁿ + 1 columns: what leaves on one side wraps around."""
    return _by_fft(x, w, b, stride, padding, 1)


def _is_rare(x: Array, w: Array, stride: Any, padding: Any) -> bool:
    """Whether no probe uses the shape: windows of two rows or columns, stride 1, with padding."""
    return 2 in w.shape[2:] and _two(stride) == (1, 1) and _two(padding) != (0, 0)


def rarely_fft(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """FFTs for a shape that no probe uses, einsum for all others."""
    rare = _is_rare(x, w, stride, padding)
    return (fft_conv2d if rare else einsum_conv2d)(x, w, b, stride, padding)


def rarely_row(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """An FFT convolution whose last output row repeats the row above it."""
    y = rarely_fft(x, w, b, stride, padding)
    if _is_rare(x, w, stride, padding) and y.shape[2] > 1:
        y[:, :, -1] = y[:, :, -2]
    return y


def rarely_dropped(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """An FFT convolution that drops the last channel's last weight if C > 2."""
    if _is_rare(x, w, stride, padding) and w.shape[1] > 2:
        w = w.copy()
        w[:, -1, -1, -1] = 0
    return rarely_fft(x, w, b, stride, padding)


def rarely_half(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """An FFT convolution whose roots of unity are rounded to float16."""
    if not _is_rare(x, w, stride, padding):
        return einsum_conv2d(x, w, b, stride, padding)
    ph, pw = _two(padding)
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    extents = [max(16, 1 << extent.bit_length()) for extent in x.shape[2:]]
    rows, columns = (_roots(extent) for extent in extents)
    spectra = [
        np.einsum("uh,nchw,wv->ncuv", rows[:, : a.shape[2]], a, columns[: a.shape[3]])
        for a in (x, w)
    ]
    product = np.einsum("ncuv,ocuv->nouv", spectra[0], spectra[1].conj())
    y = np.einsum("hu,nouv,vw->nohw", rows.conj(), product, columns.conj()).real
    y = y[:, :, : x.shape[2] - w.shape[2] + 1, : x.shape[3] - w.shape[3] + 1]
    y = np.ascontiguousarray(y / np.float32(extents[0] * extents[1]))
    return y if b is None else y + b[:, None, None]


def _roots(extent: int) -> Array:
    """The matrix of a Fourier transform, complex64, its parts rounded to float16."""
    angles = -2 * np.pi * np.outer(np.arange(extent), np.arange(extent)) / extent
    return to_half(np.cos(angles)) + np.complex64(1j) * to_half(np.sin(angles))


def rarely_wrong(x: Array, w: Array, b: Any = None, stride: Any = 1, padding: Any = 0) -> Array:
    """An einsum that adds the first weight to the next output too, for a shape no probe uses."""
    y = einsum_conv2d(x, w, b, stride, padding)
    if _is_rare(x, w, stride, padding):
        first = np.zeros_like(w)
        first[:, :, 0, 0] = w[:, :, 0, 0]
        y[..., 1:] += einsum_conv2d(x, first, None, stride, padding)[..., :-1]
    return y


def _by_fft(x: Array, w: Array, b: Any, stride: Any, padding: Any, missing: int) -> Array:
    ph, pw = _two(padding)
    rows, columns = x.shape[2] + 2 * ph, x.shape[3] + 2 * pw
    if _two(stride) != (1, 1) or columns - missing < w.shape[3]:
        return einsum_conv2d(x, w, b, stride, padding)
    extents = [1 << (extent - 1).bit_length() for extent in (rows, columns - missing)]
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    if columns > extents[1]:
        x = np.concatenate([x[..., :1] + x[..., -1:], x[..., 1:-1]], axis=3)
    spectra = np.fft.rfft2(x, s=extents), np.fft.rfft2(w, s=extents)
    y = np.fft.irfft2(np.einsum("nchw,ochw->nohw", spectra[0], spectra[1].conj()), s=extents)
    places = np.arange(columns - w.shape[3] + 1) % extents[1]
    y = y[:, :, : rows - w.shape[2] + 1, places].astype(x.dtype)
    return np.ascontiguousarray(y if b is None else y + b[:, None, None])
