"""The oracle: whether a kernel is right, on which problem it is wrong, and by how much.

`verify` and its neighbours in `r18_oracle.cli` are the ways in; `check` holds the checks of a call,
`judge` the bounds, `generate` the problems and inputs.
"""
