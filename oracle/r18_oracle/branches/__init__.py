"""Branches of host code that no problem took, and device functions that none launched.

A branch that no problem took was not verified. `measure` calls the kernels with a profile's
problems under coverage.py, `untaken` lists what they left out, and `reasons` what they may leave
out, with the reasons.
"""

from r18_oracle.branches.report import Report, branches

__all__ = ["Report", "branches"]
