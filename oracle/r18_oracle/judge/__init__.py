"""Judging values: the float64 reference, what each format can hold, bounds, and verdicts."""
