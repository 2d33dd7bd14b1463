"""The conformance suite on our own backends: `R18_BACKEND=NAME pytest tests/` runs it on that one.

By default on every backend that can run here; `--r18-profile` chooses how long to look.
"""

from r18_oracle.conformance.test_backend import (
    backend,
    test_a_download_is_a_copy,
    test_a_view_shares_its_bytes_and_no_others,
    test_events_do_not_run_backwards,
    test_every_problem_of_the_network_has_a_kernel,
    test_kernel_ids_are_unique_and_stable,
    test_kernels_describe_themselves,
    test_memory_brings_back_what_it_was_given,
    test_probe_says_what_it_runs_on,
)
from r18_oracle.conformance.test_kernels import test_kernel
from r18_oracle.conformance.test_network import (
    how,
    test_fusion_level,
    test_network,
    test_program,
    test_some_precision_runs_the_network,
)

__all__ = [
    "backend",
    "how",
    "test_a_download_is_a_copy",
    "test_a_view_shares_its_bytes_and_no_others",
    "test_events_do_not_run_backwards",
    "test_every_problem_of_the_network_has_a_kernel",
    "test_fusion_level",
    "test_kernel",
    "test_kernel_ids_are_unique_and_stable",
    "test_kernels_describe_themselves",
    "test_memory_brings_back_what_it_was_given",
    "test_network",
    "test_probe_says_what_it_runs_on",
    "test_program",
    "test_some_precision_runs_the_network",
]
