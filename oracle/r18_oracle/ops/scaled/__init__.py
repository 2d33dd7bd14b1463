"""Scaled ops: e4m3 numbers, as `r18.graph.scaled` states them.

`spec` has what they share; each op has a file of its own.
"""
