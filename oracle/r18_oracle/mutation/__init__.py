"""Mutation: does the oracle notice when a kernel's source is changed a little?

`mutants`      what a mutant is, and all of a backend's; languages plug in here
`python_edits` the operators on Python sources
`cuda_edits`   the operators on CUDA C++, over the tokens of `cuda_tokens`
`equivalents`  mutants judged by hand to mean the same, each with its reason
`names`        what the names in a package lead to
`reach`        which lines of source belong to which kernel
`plan`         a backend's mutants, and what is to be known of them before any is run
`process`      a forked process that is asked one thing after another
`trial`        one mutant, in such a process, before the oracle
`score`        what became of mutants, and the share that was caught
`record`       the evidence of a run, and what a later one may leave out
`run`          the whole run
"""
