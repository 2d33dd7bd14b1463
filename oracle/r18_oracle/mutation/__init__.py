"""Mutation: does the oracle notice when a kernel's source is changed a little?

`mutants`      what a mutant is, and all of a backend's; languages plug in here
`python_edits` the operators on Python sources
`cuda_edits`   the operators on CUDA C++, over the tokens of `cuda_tokens`
`equivalents`  mutants judged by hand to mean the same, each with its reason
`reach`        which lines of source belong to which kernel
`trial`        one mutant, in a process of its own, before the oracle
`score`        the whole run, and what it says
"""
