"""`r18 ptxcheck`: missing fences, waits and arrivals in the PTX of a backend's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from r18.cli.app import FOUND
from r18.cli.options import AsJson, NetworkName, print_result
from r18_oracle.cli.options import BackendToCheck, KernelGlob

Target = Annotated[str, typer.Option(help="The architecture to compile for.")]
AcceptedFile = Annotated[
    Path | None,
    typer.Option(
        "--reasons",
        help="JSON file of accepted violations by backend name, instead of r18's own list.",
    ),
]


def ptxcheck(
    backend: BackendToCheck = "cupy",
    kernels: KernelGlob = "*",
    target: Target = "sm_90",
    network_name: NetworkName = "resnet18",
    reasons: AcceptedFile = None,
    as_json: AsJson = False,
) -> None:
    """Check memory ordering in the PTX of a backend's kernels. Nothing runs, on no device.

    A missing fence or wait might not show in a million runs. This follows all paths of each
    function that the network launches. It reports where shared memory goes from ordinary stores to
    TMA or wgmma without a proxy fence, a bulk store is not waited for, a cluster barrier does not
    release what was written, a divided warp may reach it or an st.async may come before it, an
    mbarrier is published before its fence, a try_wait is not repeated, an accumulator of wgmma is
    used before its products are waited for or is not fenced after other uses, operands are released
    while products may read them, or a launch that overlaps the previous one reads or writes before
    it waits.

    A violation that a list accepts with a reason is only counted; --json prints it.

    Exit codes: 0 no violations, 1 a violation, or a kernel that accepted no problem of the network,
    2 a wrong request, or an accepted violation that was not found.
    """
    from r18.progress import progress_bar
    from r18_oracle.ptx.check import check

    with progress_bar() as bar:
        found = check(
            backend,
            target=target,
            kernels=kernels,
            network=network_name,
            reasons=reasons,
            on_kernel=lambda kernel: bar.show(kernel, None),
        )
    print_result(found, as_json)
    if not found.clean:
        raise typer.Exit(FOUND)
