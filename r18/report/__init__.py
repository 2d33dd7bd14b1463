"""Pages and figures of measurements and verdicts; each page is one file that loads nothing.

`evidence` reads records, an evaluation and two dumps.
`speed`, `bounds`, `mutants` and `agreement` prepare the sections of `page`, and `verification` is
the page of `r18 verify --html`. `render` fills the templates, `figures` draws with matplotlib, and
`heat` and `scale` are shared. `tables` makes the Markdown tables of the documents.
"""

from __future__ import annotations

from r18.report.evidence import Evidence, gather
from r18.report.figures import pictures
from r18.report.page import page

__all__ = ["Evidence", "gather", "page", "pictures"]
