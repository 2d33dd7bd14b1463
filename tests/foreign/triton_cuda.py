"""Triton: a matrix product of tiles as its tutorial teaches it, written for this folder."""

import torch
import triton
import triton.language as tl

import r18

LIBRARY, NEEDS = "Triton", ("triton", "torch")
FAULTS = {
    "matmul_tf32": "tl.dot gives tensor cores float32 as it is, and they cut factors off to tf32: "
    "up to twice the error of rounded ones",
}
BLOCK_M, BLOCK_N, BLOCK_K = 32, 32, 32


@triton.jit
def product(
    a, b, c, m, n, k, precision: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """One tile of c = a·b, all of them row-major; rows and columns past the ends are masked."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        inner = start + tl.arange(0, BK)
        in_a = (rows[:, None] < m) & (inner[None, :] < k)
        in_b = (inner[:, None] < k) & (columns[None, :] < n)
        left = tl.load(a + rows[:, None] * k + inner[None, :], mask=in_a, other=0.0)
        right = tl.load(b + inner[:, None] * n + columns[None, :], mask=in_b, other=0.0)
        total = tl.dot(left, right, total, input_precision=precision)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


def launched(a, b, precision):
    a, b = a.contiguous(), b.contiguous()
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    grid = triton.cdiv(m, BLOCK_M), triton.cdiv(n, BLOCK_N)
    product[grid](a, b, c, m, n, k, precision, BLOCK_M, BLOCK_N, BLOCK_K)
    return c


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda", dtype="float16")
def matmul_float16(a, b):
    return launched(a, b, "ieee")


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda")
def matmul(a, b):
    return launched(a, b, "ieee")


@r18.check.kernel(like=torch.matmul, arrays="torch-cuda", contract="tf32")
def matmul_tf32(a, b):
    return launched(a, b, "tf32")
