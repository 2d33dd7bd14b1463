"""Kernels and programs with their schedules perturbed by seeds, and the record of it."""
