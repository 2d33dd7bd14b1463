"""`r18 ptxcheck`: missing fences, waits and arrivals in the PTX of a backend's kernels."""

from __future__ import annotations

from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, NetworkName, print_result
from r18_oracle.cli.options import BackendToCheck, KernelGlob

Target = Annotated[str, typer.Option(help="The architecture to compile for.")]


def ptxcheck(
    backend: BackendToCheck = "cupy",
    kernels: KernelGlob = "*",
    target: Target = "sm_90",
    network_name: NetworkName = "resnet18",
    as_json: AsJson = False,
) -> None:
    """Check memory ordering in the PTX of a backend's kernels. Nothing runs, on no device.

    A missing fence or wait might not show in a million runs. This follows all paths of each
    function that the network launches. It reports where shared memory goes from ordinary stores to
    TMA or wgmma without a proxy fence, a bulk store is not waited for, a cluster barrier does not
    release what was written, an mbarrier is published before its fence, a try_wait is not repeated,
    or a launch that overlaps the previous one reads or writes before it waits.

    Exit codes: 0 no violations, 1 a violation, or a kernel that accepted no problem of the network,
    2 a wrong request.
    """
    from r18.progress import progress_bar
    from r18_oracle.ptx.check import check

    with progress_bar() as bar:
        found = check(
            backend,
            target=target,
            kernels=kernels,
            network=network_name,
            on_kernel=lambda kernel: bar.show(kernel, None),
        )
    print_result(found, as_json)
    if not found.clean:
        raise typer.Exit(FOUND)
