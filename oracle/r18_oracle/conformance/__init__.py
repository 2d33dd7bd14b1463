"""The conformance suite, which every backend must pass, ours and others'.

`pytest --pyargs r18_oracle.conformance --r18-backend NAME`; see `r18_oracle.plugin`.
"""
