"""Kernels on one to four threads, in a process of its own: Numba starts its threads once."""

from __future__ import annotations

import json
from pathlib import Path

from support import output_of

HELPERS = [Path(__file__).parent, Path(__file__).parents[2]]
"""The folders in which a process finds the modules of these tests."""

PROGRAM = """
import hashlib, json, numba
import emulated_tiles
from r18_numba_cpu import Backend
from r18_oracle.check.call import observe
from r18_oracle.generate.inputs import make_case
{asked}

emulated_tiles.used().__enter__()
backend = Backend()
backend.probe()
found = {{}}
for threads in (1, 2, 3, 4):
    numba.set_num_threads(threads)
    digest = hashlib.sha256()
    for kernel, problem in asked:
        if kernel in backend.kernels():
            digest.update(observe(backend, kernel, make_case(kernel, problem, "normal", 0)).output)
    found[threads] = digest.hexdigest()
print(json.dumps(found))
"""


def assert_same_bits(asked: str) -> None:
    """Every number of threads gives the same outputs.

    asked: code that makes `asked`, the kernels with their problems.
    """
    code = PROGRAM.format(asked=asked)
    found = json.loads(output_of(code, path=HELPERS, env={"NUMBA_NUM_THREADS": "4"}))
    assert list(found) == ["1", "2", "3", "4"]
    assert len(set(found.values())) == 1


__all__ = ["HELPERS", "assert_same_bits"]
