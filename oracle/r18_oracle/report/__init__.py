"""A verification as one self-contained page: looked at first, read where it matters.

`page(verification)` is the whole of it; a module a part of the page, in the order of the page.
"""

from __future__ import annotations

from r18_oracle.report.page import page

__all__ = ["page"]
