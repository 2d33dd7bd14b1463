"""Memory ordering, checked in a kernel's PTX: missing fences, waits and arrivals.

`parse` reads PTX into a control-flow graph, `flow` solves data-flow problems over it, `rules` has
the rules of memory ordering, and `check` applies them to a backend's kernels.
"""
