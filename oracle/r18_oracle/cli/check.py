"""`r18 check`: a function, judged as it stands."""

from __future__ import annotations

from typing import Annotated

import typer

from r18.cli.app import FOUND, REFUSED
from r18.cli.options import AsJson
from r18_oracle.cli.options import FINDINGS, FindingsFolder, NetworkOrNone, Seed, network_or_none

Wanted = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="FILE.py:FUNCTION, MODULE:FUNCTION, a file of marked functions or of a ModelNew "
        "(KernelBench), a solution (FlashInfer-Bench), a folder of BackendBench, or a kernel of "
        "Hugging Face's: ORGANISATION/KERNEL@VERSION:FUNCTION, or a folder with its build.",
    ),
]
Like = Annotated[
    str,
    typer.Option(
        metavar="OPERATOR",
        help="What it computes, such as torch.nn.functional.conv2d, or the file of a ModelNew's "
        "problem. [what it is named after]",
    ),
]
Dtype = Annotated[
    str, typer.Option(help="The arrays' format: float32, float16, bfloat16, float64. [float32]")
]
Arrays = Annotated[
    str, typer.Option(help="What it is given: torch, torch-cuda, cupy or numpy. [found]")
]
Contract = Annotated[
    str,
    typer.Option(
        help="A precision, such as tf32, or a contract as this command prints it. [found]"
    ),
]


def check(
    target: Wanted,
    like: Like = "",
    dtype: Dtype = "",
    arrays: Arrays = "",
    contract: Contract = "",
    refuses: Annotated[
        str,
        typer.Option(metavar="PLACE", help="A function that says what it does not take."),
    ] = "",
    deterministic: Annotated[
        bool, typer.Option(help="Whether it must give the same bits each time.")
    ] = True,
    profile: Annotated[
        str, typer.Option(help="Effort: brief, quick, ci, thorough or nightly.")
    ] = "quick",
    network_name: NetworkOrNone = "resnet18",
    seed: Seed = 0,
    findings: FindingsFolder = FINDINGS,
    as_json: AsJson = False,
) -> None:
    """Judge any function with the signature of one of PyTorch's operators.

    Finds what it computes with, unless a contract is given, and searches it for a fault as
    `r18 verify` does a backend's kernel: generated shapes against bounds derived from that.
    A function that computes in less than its arrays hold fails unless its contract is given.

    Exit codes: 0 right, 1 wrong or narrower than its arrays, 2 a wrong request or nothing was run.
    """
    from r18.progress import progress_bar
    from r18_oracle import checked

    options: dict[str, object] = {
        "dtype": dtype,
        "arrays": arrays,
        "contract": contract,
        "refuses": refuses,
    }
    options |= {} if deterministic else {"deterministic": False}
    asked = checked.asked_for(target, like or None, **options)
    results = []
    with progress_bar() as bar:
        for one in asked.targets:
            bar.start(1)
            how = checked.How(profile, seed, network_or_none(network_name))
            results.append(checked.check(one, how, on_progress=bar.show))
            bar.advance(one.place)
    if as_json:
        typer.echo(checked.dumped(results))
    else:
        typer.echo("\n\n".join(result.text(findings) for result in results))
    for sentence in (*asked.left_out, *asked.broken):
        typer.echo(f"not judged: {sentence}", err=True)
    if asked.broken or any(result.judged and not result.ok for result in results):
        raise typer.Exit(FOUND)
    if not all(result.judged for result in results):
        raise typer.Exit(REFUSED)
