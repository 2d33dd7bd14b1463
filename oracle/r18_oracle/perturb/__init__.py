"""Run kernels and programs with schedules perturbed by seeds, and record the results."""
