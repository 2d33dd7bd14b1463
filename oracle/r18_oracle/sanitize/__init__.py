"""Kernels under NVIDIA's compute-sanitizer, and the record of it."""
