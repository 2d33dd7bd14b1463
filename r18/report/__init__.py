"""`r18 report`: one page, and pictures, of what was measured; files that load nothing.

`evidence` reads records, an evaluation and two dumps, and `checked` says whether a record is whole;
`speed`, `layers`, `fusion`, `bounds`, `mutants`, `sanitizers`, `agreement` and `checkpoints` are a
section of the page each, in its order; `page` puts them together, and `pictures` draws those for a
README. What every page of ours is made of is `shell`, `markup`, `bars`, `heat` and `scale`.
"""

from __future__ import annotations

from r18.report.evidence import Evidence, gather
from r18.report.page import page
from r18.report.pictures import pictures

__all__ = ["Evidence", "gather", "page", "pictures"]
