"""Hints about a kernel that raises or writes nothing, where the cause is a usual mistake."""

from __future__ import annotations

import linecache
import re

from r18.backend import HostKernel, Kernel
from r18.errors import raised_in
from r18_oracle.check.call import Raised

UNWRITTEN = "; write into out (out[...] = y): what the function returns is ignored"


def raised(error: BaseException, kernel: Kernel) -> str:
    """A message with a kernel's error, the function and line that raised it, and a hint."""
    place = raised_in(error, ours=True)
    words = Raised(error).words(f" in {place}" if place else "")
    return words + _workspace_hint(error, kernel)


def unwritten(kernel: Kernel) -> str:
    """A hint for an output without a written element."""
    return UNWRITTEN if isinstance(kernel, HostKernel) else ""


def _workspace_hint(error: BaseException, kernel: Kernel) -> str:
    """A hint for a plugin's line that names the workspace, which is empty because none was
    declared."""
    if not isinstance(kernel, HostKernel) or kernel.scratch is not None:
        return ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is getattr(kernel.run, "__code__", None) and code.co_argcount == 5:
            line = linecache.getline(code.co_filename, trace.tb_lineno)
            if re.search(rf"\b{code.co_varnames[4]}\b", line):
                return "; the workspace has 0 bytes: declare scratch=lambda problem: nbytes"
        trace = trace.tb_next
    return ""
