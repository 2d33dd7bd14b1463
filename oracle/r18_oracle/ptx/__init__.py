"""Memory ordering, checked in a kernel's PTX: fences, waits and arrivals that are missing.

`parse` reads PTX into a control-flow graph, `flow` solves data-flow problems over it, `rules` says
what must come before what, and `check` applies the rules to a backend's kernels.
"""
