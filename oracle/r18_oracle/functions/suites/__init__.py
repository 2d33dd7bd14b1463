"""Kernels in the forms of benchmark suites, called as functions like PyTorch's operators.

1. `adapted` is such a kernel: it takes an operator's arguments and passes them on.
2. `backendbench` reads a folder of `<op>__<overload>_kernel_impl` functions, which take the
   arguments of an ATen operator.
3. `kernelbench` takes a `ModelNew` and the `Model` that it replaces, if that is one operator.
4. `flashinfer` reads a FlashInfer-Bench solution of a matrix product.
5. `hub` imports a kernel by Hugging Face's package `kernels`, whose functions need no adapter.

A suite's own inputs and tolerances are not used: only its calling convention is.
"""
