"""The bias is added after the product."""


def addmm__default_kernel_impl(input, mat1, mat2, *, beta=1, alpha=1):
    return beta * input + alpha * (mat1 @ mat2)
