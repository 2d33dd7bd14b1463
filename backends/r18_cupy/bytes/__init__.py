"""Base classes and helpers shared by the integer and e4m3 kernels, whose operands are bytes.

Tiles, packed weights, tensor maps and launches follow from the size of an operand. `integers` and
`float8` add precision, contract, and the epilogue's operands. See kernels/bytes.
"""
