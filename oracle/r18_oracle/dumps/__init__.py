"""Dumps of checkpoints, step fixtures, and the comparison of dumps."""
