"""Dumps of a quantised network's intermediate values in ONNX Runtime or OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from r18.bench.baselines import Way, device_words
from r18.bench.baselines.integers import peer_integers
from r18.graph.passes import fuse
from r18.graph.precision import INT8
from r18.graph.quantize import LEVEL, quantized, value_scales
from r18.graph.schedule import Schedule
from r18.weights import Weights
from r18.weights.precisions import quantization_of
from r18_oracle.dumps.dumps import INPUT, MANIFEST, Dump, Made, write_dump_manifest
from r18_oracle.dumps.files import (
    Origin,
    TensorFile,
    check_free,
    sha256_of,
    whole_folder,
    write_tensor,
)
from r18_oracle.network.images import Images


def write_peer_dump(
    folder: str | Path,
    peer: str,
    schedule: Schedule,
    weights: Weights,
    images: Images,
    *,
    optimised: bool = True,
    overwrite: bool = False,
    progress: Callable[[TensorFile], None] | None = None,
) -> Dump:
    """Run a peer on a schedule (at level `none`) in int8, and write every value that it computes.

    Names and scales are those of a backend's dump of all checkpoints, so `r18 diff` compares the
    two. optimised: see `peer_integers`. Raises what that raises, `WeightsError` for weights without
    a quantisation, and `DumpError`.
    """
    folder = Path(folder)
    images.check(schedule)
    quantization = quantization_of(weights)
    integers = quantized(fuse(schedule, LEVEL), quantization.bits)
    check_free(folder, "dump", MANIFEST, overwrite)
    found = peer_integers(peer, schedule, quantization, images.values, optimised=optimised)
    scales = value_scales(integers, quantization.scales)
    place = {step.output: index for index, step in enumerate(integers.steps)}
    names = [name for name, value in integers.taps.items() if value in place]
    names.sort(key=lambda name: place[integers.taps[name]])
    made = Made(
        backend=peer if optimised else f"{peer}, unoptimised",
        device=device_words(Way(peer), "cpu"),
        precision=INT8.name,
        fusion=LEVEL,
        network=schedule.name,
        weights=Origin(weights.source, weights.sha256),
        input=Origin(images.source, sha256_of(images.values)),
        kernels={},
    )
    with whole_folder(folder, "dump", MANIFEST, overwrite) as draft:
        image_file = write_tensor(draft, INPUT, images.values)
        files = []
        for name in names:
            value = integers.taps[name]
            array, scale = found[value], scales.get(value)
            kind = None if scale is None else array.dtype.name
            files.append(write_tensor(draft, name, array, kind, scale))
            if progress is not None:
                progress(files[-1])
        write_dump_manifest(draft / MANIFEST, made, image_file, files)
    return Dump(folder, tuple(files), made, image_file)


__all__ = ["write_peer_dump"]
