"""The mean of the axes that are asked for."""


def mean__dim_kernel_impl(input, dim, keepdim=False):
    return input.mean(dim, keepdim)
