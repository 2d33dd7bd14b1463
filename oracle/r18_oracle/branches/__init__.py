"""Branches of host code that no problem took, and device functions that none launched.

A branch that no problem took was not verified. `measure` shows the kernels a profile's problems
under coverage.py, `untaken` says what they left out, and `reasons` what is left out knowingly.
"""

from r18_oracle.branches.report import Report, branches

__all__ = ["Report", "branches"]
