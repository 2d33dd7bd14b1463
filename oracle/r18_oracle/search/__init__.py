"""Campaigns over kernels in worker processes, and `verify`, which runs them all."""
