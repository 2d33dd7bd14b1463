"""The oracle's specification of each quantised op: one `OpSpec` per file, judged by equality.

`spec`       what they share: problems made of the float op's, and drawn integers
`requantize` the way from a sum to an integer, as specified and as others do it
"""
