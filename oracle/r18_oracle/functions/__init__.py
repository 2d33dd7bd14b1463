"""Any function as a backend with one kernel: `r18 check my_kernels.py:conv2d`.

A kernel that is judged as it stands is a Python function with the signature of one of PyTorch's
operators. `FunctionBackend` makes a backend of it, so that every check of `r18 verify` runs on it
unchanged: drawn shapes, exact integers, bounds, state between calls, worker processes, replay.

1. `likes` says which op of `r18.graph.ops` an operator is, and how a problem's arrays and settings
   become the arguments of a call.
2. `signature` binds them to the parameters that the function has. Calls with
   other arguments are refused: a `conv2d(x, w)` is never called with a stride.
3. `arrays` hands the function NumPy arrays or tensors over the buffers of a call, not copies, so
   that the guards around a buffer guard what the function reads.
4. `arithmetic` is what the function is held to: the format of factors and sums, and whether sums
   are cut off. It is declared (`--contract`) or found (`r18_oracle.probe`).
5. `target` is the whole request as one string, `check:FILE:FUNCTION?like=…`. Where a backend's name
   is expected (in a worker process, in a finding's file) that string stands for the function.
   `r18 replay` runs the code that it names only if the user repeats it, as for a `module:attr`.

Nothing here judges: the floors above do.
"""
