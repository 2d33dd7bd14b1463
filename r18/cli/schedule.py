"""`r18 schedule`: the network as a table, step by step."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated, Any

import typer
from tabulate import tabulate

from r18.cli.options import AsJson, ImageSize, NetworkName, chosen_schedule
from r18.graph.ops import AvgPoolLinear, Conv2d, ConvMaxPool, ConvProjection, MaxPool2d, Op
from r18.graph.passes import FUSION_LEVELS, fuse
from r18.graph.schedule import Schedule


def schedule(
    network_name: NetworkName = "resnet18",
    fusion: Annotated[str, typer.Option(help=f"One of: {', '.join(FUSION_LEVELS)}.")] = "none",
    batch: Annotated[int, typer.Option(help="Images at once.", min=1)] = 1,
    image_size: ImageSize = None,
    as_json: AsJson = False,
) -> None:
    """Print the network's steps: op, shapes, MACs, parameters, bytes; and the totals.

    Parameters are the trainable ones. Bytes are those of the step's output in float32. A backend's
    plan (`r18 plan`) may also fuse max-pooling with its convolution.
    """
    fused = fuse(chosen_schedule(network_name, image_size), fusion)
    steps = rows(fused, batch)
    totals = {key: sum(step[key] for step in steps) for key in ("macs", "parameters", "bytes")}
    if as_json:
        head = {
            "network": fused.name,
            "fusion": fusion,
            "batch": batch,
            "input": [batch, *fused.input_shape],
        }
        typer.echo(json.dumps(head | {"totals": totals, "steps": steps}, indent=2))
        return
    table = [
        (
            step["step"],
            step["label"],
            " ".join("×".join(map(str, shape)) for shape in step["inputs"]),
            "×".join(map(str, step["output"])),
            *(f"{step[key]:,}" if step[key] else "" for key in totals),
        )
        for step in steps
    ]
    table.append(("total", f"{len(steps)} steps", "", "", *(f"{n:,}" for n in totals.values())))
    headers = ("step", "op", "inputs", "output", "MACs", "parameters", "bytes")
    align = ("left", "left", "left", "left", "right", "right", "right")
    typer.echo(tabulate(table, headers, disable_numparse=True, colalign=align))
    typer.echo(
        f"\n{fused.name}: {totals['macs'] / 1e9:.3f} GMAC and {totals['bytes'] / 1e6:.1f} MB of "
        f"outputs at batch {batch}, {totals['parameters']:,} parameters"
    )


def rows(schedule: Schedule, batch: int) -> list[dict[str, Any]]:
    """The rows of the table, one for each step, as JSON has them."""
    problems = schedule.problems(batch)
    return [
        {
            "step": step.name,
            "op": step.op.name,
            "label": _label(step.op),
            "settings": asdict(step.op),
            "reads": list(step.inputs),
            "makes": step.output,
            "inputs": [list(shape) for shape in problems[step.name].inputs],
            "output": list(problems[step.name].output),
            "macs": problems[step.name].macs,
            "parameters": sum(
                math.prod(spec.shape) for spec in step.op.weights() if spec.kind != "bn_buffer"
            ),
            "bytes": 4 * math.prod(problems[step.name].output),
        }
        for step in schedule.steps
    ]


def _label(op: Op) -> str:
    """The op's label, with window and stride: `conv2d 3×3/2`; of each of two ops."""
    if isinstance(op, ConvMaxPool | ConvProjection | AvgPoolLinear):
        return " + ".join(map(_label, op.parts))
    if not isinstance(op, Conv2d | MaxPool2d):
        return op.label
    window, stride = ("×".join(map(str, pair)) for pair in (op.kernel_size, op.stride))
    return f"{op.label} {window}/{stride if len(set(op.stride)) > 1 else op.stride[0]}"
