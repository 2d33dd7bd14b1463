"""Mutation testing: does the oracle notice small changes to a kernel's source?

`edits`        the mutation operators, by language and kind
`mutants`      the mutants of a backend; languages are registered here
`equivalents`  mutants judged equivalent by hand, each with its reason
`names`        the definitions that the names in a package refer to
`reach`        the source lines that belong to each kernel
`plan`         a backend's mutants, and what is known about them before the run
`process`      a forked process that handles one request after another
`trial`        the oracle on one mutant, in such a process
`sanitizing`   survivors in device code under compute-sanitizer
`score`        the fates of mutants, and the share that was caught
`record`       the evidence of a run, which later runs reuse
`run`          the whole run
`tested`       mutants of sources that no kernel runs, which tests judge
"""
