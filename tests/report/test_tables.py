"""Tables from records: their content, and that README.md's are the records'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import tool
from r18 import records
from r18.backend import Timing
from r18.backend.tuned import APART
from r18.bench import tuning
from r18.bench.inputs.from_host import FromHost
from r18.bench.record import floors_of
from r18.bench.roofline import limits
from r18.bench.tuning import shipped_table
from r18.errors import UnknownName, UsageError
from r18.graph.passes import fuse, fuse_pool
from r18.graph.resnet import resnet18
from r18.records.kinds import MutateSample
from r18.report.tables import rendered
from r18.report.tables.conditions import OLD, WARM
from r18.report.tables.timed import bench_captions
from support import ROOT
from whole_records import ceilings_of, whole

ENVIRONMENT = {
    "device": {"kind": "cuda", "name": "NVIDIA H200 (sm_90)"},
    "packages": {"torch": "2.11.0"},
    "driver": "580.1",
}


def group(batch: int, *rows: tuple[str, float, float | None]) -> dict[str, Any]:
    return {
        "batch": batch,
        "date": "2026-11-20T10:00:00+00:00",
        "environment": ENVIRONMENT,
        "warmup": 50,
        "repeat": 1000,
        "rows": [
            {
                "backend": name,
                "ms_per_image": ms,
                "images_per_second": 1e3 / ms,
                "ratio": ratio,
                "best_ratio": ratio,
                "peak_rss_nbytes": None,
            }
            for name, ms, ratio in rows
        ],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    groups = {
        "resnet18/fp32/all/b1": group(1, ("cupy", 0.5, 0.25), ("cupy (direct)", 12.3456, 6.2)),
        "resnet18/fp32/all/b64": group(64, ("cupy", 0.0625, None)),
        "resnet18/fp16/all/b1": group(1, ("cupy", 0.25, 0.5)),
    }
    entry = {
        "verified": True,
        "problems": 1000,
        "refused": {"too large": 2},
        "error_over_bound": 0.5,
        "date": "2026-11-20T10:00:00+00:00",
        "profile": "thorough",
    }
    kernels = {
        "cupy/conv2d/direct/fp32": entry,
        "cupy/conv2d/direct/fp16": entry | {"error_over_bound": 0.75, "verified": False},
        "cupy/gap/mean/fp32": entry | {"refused": {}},
        "torch/gap/mean/fp32": entry,
    }
    tool = {
        "kernels": {"cupy/gap/mean/fp32": {"digest": "d", "problems": 40}},
        "errors": 0,
        "verdict": "clean",
        "date": "2026-11-20T10:00:00+00:00",
    }
    run = {
        "date": "2026-11-20T10:00:00+00:00",
        "mutants": 1200,
        "killed": 990,
        "survived": 10,
        "equivalent": 180,
        "invalid": 20,
        "left": 0,
        "score": 99.0,
    }
    device = {"format": 1, "device": "NVIDIA H200 (sm_90)"}
    for what, data in {
        "mutate": {"backends": {"cupy": run, "numba": run | {"date": "2026-11-22"}}},
        "bench": {"groups": groups},
        "verify": {"kernels": kernels},
        "sanitize": {"sanitizer": "compute-sanitizer 2025.3", "tools": {"memcheck": tool}},
    }.items():
        path = tmp_path / f"{what}-nvidia-h200.json"
        records.write(path, whole({"record": what, **device, **data}))
    return tmp_path


def block(marker: str, body: str = "old\n") -> str:
    return f"before\n<!-- table: {marker} -->\n{body}<!-- /table -->\nafter\n"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_a_table_of_times(folder: Path) -> None:
    marker = "bench devices=nvidia-h200 precisions=fp32,fp16 batches=1,64"
    text = rendered(block(marker), folder)
    assert lines(text) == [
        "| backend | device | precision | batch | ms/image | images/s | / PyTorch | / best peer "
        "| error | error / PyTorch |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: | --: |",
        "| cupy | nvidia-h200 | fp32 | 1 | 0.5 | 2,000 | 0.25 | 0.25 | — | — |",
        "| cupy (direct) | nvidia-h200 | fp32 | 1 | 12.35 | 81 | 6.20 | 6.20 | — | — |",
        "| cupy | nvidia-h200 | fp32 | 64 | 0.0625 | 16,000 |  |  | — | — |",
        "| cupy | nvidia-h200 | fp16 | 1 | 0.25 | 4,000 | 0.50 | 0.50 | — | — |",
    ]
    assert text.count("—: recorded before `r18 bench` measured errors.") == 1
    assert text.count(WARM) == 1
    assert "Cold" not in text
    caption = "NVIDIA H200 (sm_90), PyTorch 2.11.0, driver 580.1, 2026-11-20: medians of 1000 runs"
    assert text.count(caption) == 1
    assert text.startswith(f"before\n<!-- table: {marker} -->\n")
    assert text.endswith("<!-- /table -->\nafter\n")
    assert "old\n" not in text


def test_a_table_of_batches_from_host_memory(folder: Path) -> None:
    marker = "from-host devices=nvidia-h200 precisions=fp32,fp16 batches=1,64"
    text = rendered(block(marker), folder)
    assert lines(text) == []  # no row was measured so
    assert "Not measured yet: `r18 bench --from-host --record` does." in text
    path = folder / "bench-nvidia-h200.json"
    record = json.loads(path.read_text())
    fed = FromHost(9_633_792, 400, (0.5, 0.52, 0.51), (0.2, 0.19, 0.21))
    (row,) = record["groups"]["resnet18/fp32/all/b64"]["rows"]
    row |= {"median_ms": 0.5, "from_host": fed.to_json(64, 0.5)}
    records.write(path, whole(record))
    text = rendered(block(marker), folder)
    assert lines(text) == [
        "| backend | device | precision | batch | warm ms | cold ms | from host ms | images/s "
        "| of warm | copy only ms | copy GB/s |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| cupy | nvidia-h200 | fp32 | 64 | 0.5 | — | 0.51 | 125,490 | 98.0% | 0.2 | 48.2 |",
    ]
    assert "Cold, —: not measured yet; `r18 bench --cold --record` does." in text
    assert (
        "NVIDIA H200 (sm_90), driver 580.1, 2026-11-20: milliseconds per batch of uint8 pixels, "
        "medians of 3 stretches of 400 batches; the stretches of one program differ by at most "
        "3.9%." in text
    )
    row |= {"cold": COLD | {"median_ms": 0.55}}
    records.write(path, whole(record))
    text = rendered(block(marker), folder)
    assert "| 64 | 0.5 | 0.55 | 0.51 |" in text
    assert "Cold: 537 MB are overwritten before each run" in text
    assert "not measured yet" not in text


def test_a_table_of_times_on_a_cpu_has_peak_memory_threads_and_peers(tmp_path: Path) -> None:
    found = group(8, ("numpy", 4.0, 1.5), ("onnxruntime", 2.0, 0.75))
    found["environment"] = {
        "device": {"kind": "cpu", "name": "CPU (x86_64), NumPy 2.4.6"},
        "packages": {"torch": "2.11.0", "onnxruntime": "1.20", "openvino": "2025.1"},
    }
    found["machine"] = {"processor": "EPYC", "cpus": 4, "threads": 2}
    found["rows"][0]["peak_rss_nbytes"] = 1_234_567_890
    data = {
        "record": "bench",
        "format": 1,
        "device": "CPU",
        "groups": {"resnet18/fp32/all/b8": found},
    }
    records.write(tmp_path / "bench-cpu.json", whole(data))
    text = rendered(block("bench devices=cpu precisions=fp32 batches=1,8"), tmp_path)
    head, _, ours, peer = lines(text)
    assert head.endswith("| / PyTorch | / best peer | error | error / PyTorch | peak MB |")
    assert ours == "| numpy | cpu | fp32 | 8 | 4 | 250 | 1.50 | 1.50 | — | — | 1,235 |"
    assert peer == "| onnxruntime | cpu | fp32 | 8 | 2 | 500 | 0.75 | 0.75 | — | — |  |"
    words = "EPYC, 2 threads, PyTorch 2.11.0, ONNX Runtime 1.20, 2026-11-20"
    assert words in text  # OpenVINO is installed and was not timed


def on_cpu(data: dict[str, Any], processor: str, **machine: Any) -> dict[str, Any]:
    environment = {"device": {"kind": "cpu", "name": "CPU (x86_64)"}, "packages": {}}
    host = {"processor": processor, "cpus": 4, "threads": 2, **machine}
    return data | {"environment": environment, "machine": host}


def test_a_table_of_cpus_has_every_cpu_on_record_next_to_each_library(tmp_path: Path) -> None:
    """Every recorded CPU has a row next to each library; untimed cells and GPUs are left out."""
    eager = "torchvision eager"
    full = group(8, ("numba-cpu", 2.0, 0.25), ("openvino", 4.0, 0.5), (eager, 8.0, 1.0))
    full["rows"] += group(8, ("onnxruntime", 6.0, 0.75), ("torch", 1.0, 0.125))["rows"]
    ours, best, peer, *_ = full["rows"]
    ours |= {"error": error(6e-6), "error_ratio": 3.0, "best_ratio": 0.5}
    best |= {"error": error(3e-6), "error_ratio": 1.5}
    peer |= {"error": error(2e-6), "error_ratio": 1.0}
    exact = group(1, ("numba-cpu", 3.0, 1.5), ("openvino", 2.0, None), ("onnxruntime", 4.0, None))
    exact["rows"][0] |= {"error": error(0.0, "integers"), "error_ratio": None}
    exact["rows"][1] |= {"error": error(0.02, "integers"), "error_ratio": None}
    bare = group(1, ("numba-cpu", 5.0, None), ("numpy", 7.0, None))
    others = group(8, ("numpy", 7.0, 0.5), (eager, 14.0, 1.0))
    xeon = {"cpu": {"instructions": ["AVX-512", "AMX-INT8"]}}
    for slug, groups in {
        "amd-epyc": {
            "resnet18/fp32/all/b8": on_cpu(full, "AMD EPYC"),
            "resnet18/int8/all/b1": on_cpu(exact, "AMD EPYC"),
            "resnet18/bf16/all/b8": on_cpu(others, "AMD EPYC"),
        },
        "intel-xeon-processor": {
            "resnet18/bf16/all/b1": on_cpu(bare, "Intel(R) Xeon(R) Processor", **xeon),
        },
        "nvidia-h200": {"resnet18/fp32/all/b8": group(8, ("numba-cpu", 9.0, None))},
    }.items():
        head = {"record": "bench", "format": 1, "device": slug}
        records.write(tmp_path / f"bench-{slug}.json", whole(head | {"groups": groups}))
    marker = "cpus precisions=fp32,bf16,int8 batches=1,8"
    head, _, *rows = lines(text := rendered(block(marker), tmp_path))
    assert head == (
        "| CPU | precision | batch | numba-cpu | OpenVINO | ONNX Runtime | PyTorch | / best peer | "
        "its error | error | error / PyTorch |"
    )
    epyc, intel = "AMD EPYC, 2 threads", "Intel Xeon Processor (AMX-INT8), 2 threads"
    assert rows == [
        f"| {epyc} | fp32 | 8 | 2 | 4 | 6 | 8 | 0.50 | 3.0e-06 | 6.0e-06 | 3.00 (worse) |",
        f"| {epyc} | int8 | 1 | 3 | 2 | 4 |  | 1.50 | 2.0e-02 | exact | exact |",
        f"| {intel} | bf16 | 1 | 5 |  |  |  |  |  | — | — |",
    ]
    assert "Milliseconds per image." in text
    assert "\nIntel Xeon Processor (AMX-INT8): AVX-512, AMX-INT8.<br>" in text
    assert "AMD EPYC: " not in text  # its record is older than these facts
    assert f"\n{epyc}, 2026-11-20: medians of " in text
    assert "—: recorded before `r18 bench` measured errors." in text
    one = rendered(block(f"{marker} backend=numpy"), tmp_path)
    assert [row.split(" | ")[:4] for row in lines(one)[2:]] == [
        [f"| {epyc}", "bf16", "8", "7"],
        [f"| {intel}", "bf16", "1", "7"],
    ]
    (tmp_path / "bench-intel-xeon-processor.json").unlink()
    assert lines(rendered(block(marker), tmp_path))[2:] == rows[:2]
    with pytest.raises(UsageError, match="no record of a CPU has a time of 'x' in fp32, batch 1"):
        rendered(block("cpus precisions=fp32 batches=1 backend=x"), tmp_path)


COLD = {"nbytes": 512 << 20, "runs": 30, "median_ms": 1.0, "p10_ms": 0.9, "p90_ms": 1.2}


def error(relative: float | str, reference: str = "float64") -> dict[str, Any]:
    return {"relative": relative, "images": 8, "reference": reference}


def test_rows_have_errors_and_a_line_for_each_state(tmp_path: Path) -> None:
    """A cold program is compared with cold PyTorch; a fast, less exact program says so."""
    eager, graph = "torchvision eager", "torchvision graph"
    found = group(8, ("cupy", 0.1, 0.25), ("cupy (direct)", 1.0, 2.5), (eager, 0.4, 1.0))
    found["rows"] += group(8, (graph, 0.2, 0.5))["rows"]
    ours, direct, peer, other = found["rows"]
    fed = FromHost(1_204_224, 400, (1.6, 1.6), (0.2, 0.2)).to_json(8, 0.8)
    ours |= {"error": error(5e-6), "error_ratio": 2.5, "cold": COLD, "from_host": fed}
    direct |= {"error": error(3e-6), "error_ratio": 1.5, "cold": COLD, "algorithm": "conv2d=direct"}
    peer |= {"error": error(2e-6), "error_ratio": 1.0, "cold": COLD | {"median_ms": 4.0}}
    peer |= {"from_host": fed | {"median_ms": 3.2}}
    other |= {"error": None, "no_error": "it was lost", "cold": COLD | {"median_ms": 2.0}}
    exact = group(8, ("cupy", 0.05, 0.1), ("onnxruntime", 0.2, 0.5))
    exact["rows"][0] |= {"error": error(0.0, "integers"), "error_ratio": None}
    exact["rows"][1] |= {"error": error(0.02, "integers"), "error_ratio": None}
    data = {"record": "bench", "format": 1, "device": "NVIDIA H200 (sm_90)"}
    groups = {"resnet18/fp32/all/b8": found, "resnet18/int8/all/b8": exact}
    records.write(tmp_path / "bench-nvidia-h200.json", whole(data | {"groups": groups}))
    text = rendered(block("bench devices=nvidia-h200 precisions=fp32,int8 batches=8"), tmp_path)
    place = "nvidia-h200 | fp32 | 8"
    assert lines(text)[2:] == [
        f"| cupy | {place} | 0.1 | 10,000 | 0.25 | 0.25 | 5.0e-06 | 2.50 (worse) |",
        f"| cupy, cold | {place} | 0.125 | 8,000 | 0.25 | 0.50 | 5.0e-06 | 2.50 (worse) |",
        f"| cupy, from host | {place} | 0.2 | 5,000 | 0.50 |  | — | — |",
        f"| cupy (direct) | {place} | 1 | 1,000 | 2.50 | 2.50 | 3.0e-06 | 1.50 |",
        f"| torchvision eager | {place} | 0.4 | 2,500 | 1.00 | 1.00 | 2.0e-06 | 1.00 |",
        f"| torchvision graph | {place} | 0.2 | 5,000 | 0.50 | 0.50 | — | — |",
        "| cupy | nvidia-h200 | int8 | 8 | 0.05 | 20,000 | 0.10 | 0.10 | exact | exact |",
        "| onnxruntime | nvidia-h200 | int8 | 8 | 0.2 | 5,000 | 0.50 | 0.50 | 2.0e-02 | — |",
    ]
    for caption in (
        "Error: rms of the logits' difference from float64 over their rms, of 8 seeded images; "
        "next to it, divided by that of torchvision eager in the same run.",
        "In int8 the reference is the specification's integers: `exact` is equal to the bit.",
        "—: it was lost.",
        "—: its integers are not the specification's.",
        "Cold: 537 MB are overwritten before each run, which is not timed, so that nothing of the "
        "run before is in that cache; medians of 30 runs.",
        "From host: the program reads uint8 pixels from host memory, batch after batch.",
    ):
        assert text.count(caption) == 1, caption
    assert OLD not in text


def test_a_table_of_what_was_verified(folder: Path) -> None:
    text = rendered(block("verify device=nvidia-h200"), folder)
    assert lines(text)[2:] == [
        "| conv2d | direct | fp32 fp16 | 1 of 2 | 2,000 | 4 | 0.75 |",
        "| gap | mean | fp32 | 1 of 1 | 1,000 | 0 | 0.5 |",
    ]
    assert "NVIDIA H200 (sm_90), profile thorough, 2026-11-20." in text


def test_a_table_of_the_sanitizers_tools(folder: Path) -> None:
    text = rendered(block("sanitize device=nvidia-h200"), folder)
    assert lines(text)[2:] == ["| memcheck | 1 | 40 | 0 | clean |"]


# -- next to the floor -------------------------------------------------------------------------

CEILINGS = {
    "record": "ceilings",
    "format": 1,
    "device": "NVIDIA H200 (sm_90)",
    "date": "2026-11-21T10:00:00+00:00",
    "threads": None,
    "rates": {
        "fp32": {"operations_per_second": 5e13},
        "fp16": {"operations_per_second": 7.5e14},
    },
    "copy": {"bytes_per_second": 4e12},
}
FUSED: dict[bool, tuple[str, ...]] = {False: (), True: ("conv2d_maxpool2d",)}
POOLS = {"cupy/conv2d_maxpool2d/few_channels_mma/fp16/nhwc": 1}


def floor(precision: str, batch: int, *, pooled: bool = False) -> float:
    ceilings = ceilings_of(CEILINGS)
    found = limits(resnet18(), precision, "all", batch, ceilings, fused=FUSED[pooled])
    return sum(one.floor_ms for one in found.values())


def timed(precision: str, batch: int, fusion: str = "all", **medians: float) -> dict[str, Any]:
    """A group of `resnet18`; `cupy` pools in fp16. `eager_cl` is eager in channels-last."""
    names = {
        "eager": "torchvision eager",
        "eager_cl": "torchvision eager, channels-last",
        "compiled": "torchvision compile",
    }
    rows = [
        {
            "backend": names.get(name, name),
            "median_ms": median,
            "kernels": POOLS if (name, precision) == ("cupy", "fp16") else {},
        }
        for name, median in medians.items()
    ]
    head = {"network": "resnet18", "precision": precision, "fusion": fusion, "machine": {}}
    return group(batch) | head | {"rows": rows}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    groups = [
        timed("fp16", 8, cupy=0.5, eager=2.0, eager_cl=1.25, compiled=1.5),
        timed("fp16", 1, cupy=0.25),
        timed("fp32", 64, cupy=4.0, eager=8.0, torch=1.0, onnxruntime=0.5),
        timed("fp32", 1, torch=1.0, eager=1.0),
        timed("fp32", 1, "none", cupy=3.0),
        timed("bf16", 1, cupy=0.125, compiled=0.5),
    ]
    groups[0]["rows"][0] |= {
        "ratio": 0.25,
        "error": error(3e-3),
        "error_ratio": 1.5,
        "cold": COLD | {"median_ms": 0.625},
        "from_host": FromHost(1_204_224, 400, (0.75,), (0.2,)).to_json(8, 0.5),
    }
    data = {"record": "bench", "format": 1, "device": "NVIDIA H200 (sm_90)"}
    names = map(str, range(len(groups)))
    records.write(
        tmp_path / "bench-nvidia-h200.json",
        whole(data | {"groups": dict(zip(names, groups, strict=True))}),
    )
    records.write(tmp_path / "ceilings-nvidia-h200.json", whole(CEILINGS))
    return tmp_path


def test_a_table_of_the_network_and_its_floor(measured: Path) -> None:
    """Every cell of the record, in the order of precisions and batches.

    A program that pools has the floor of the pooled stem; without a rate there is none. The
    best of PyTorch's modes is neither another backend nor another library.
    """
    text = rendered(block("roofline device=nvidia-h200"), measured)
    plain, small = floor("fp32", 64), floor("fp16", 1, pooled=True)
    large = floor("fp16", 8, pooled=True)
    best = "1.25 | eager, channels-last | 2.50"
    assert large < floor("fp16", 8)
    assert lines(text)[0] == (
        "| precision | batch | direct floor ms | floor ms | measured ms | measured / floor "
        "| cold ms | from host ms | best PyTorch ms | its mode | PyTorch / r18 "
        "| error / PyTorch |"
    )
    assert lines(text)[2:] == [
        f"| fp32 | 64 | {plain:.4g} | {plain:.4g} | 4 | {4 / plain:.2f} | — | — "
        "| 8 | eager | 2.00 | — |",
        f"| fp16 | 1 | {small:.4g} | {small:.4g} | 0.25 | {0.25 / small:.2f} | — | — "
        "|  |  |  | — |",
        f"| fp16 | 8 | {large:.4g} | {large:.4g} | 0.5 | {0.5 / large:.2f} "
        f"| 0.625 | 0.75 | {best} | 1.50 (worse) |",
        "| bf16 | 1 |  |  | 0.125 |  | — | — | 0.5 | compile | 4.00 | — |",
    ]
    said = "2026-11-21: fp32 50, fp16 750 TFLOP/s by a library; copy 4 TB/s by a library."
    assert said in text
    assert text.count("medians of 1000 runs") == 1
    assert "Cold or from host, —: not measured yet" in text
    other = rendered(block("roofline device=nvidia-h200 fusion=none"), measured)
    assert [line.split(" | ")[4] for line in lines(other)[2:]] == ["3"]
    other = rendered(block("roofline device=nvidia-h200 backend=torch"), measured)
    assert [line.split(" | ")[1] for line in lines(other)[2:]] == ["1", "64"]


def pace(rate: float) -> dict[str, Any]:
    return {"per_second": rate, "best": 1.01 * rate, "runs": 9}


def measured_ceiling(burst: float, sustained: float) -> dict[str, Any]:
    return {"burst": pace(burst), "sustained": pace(sustained), "how": "again and again"}


INSTRUCTIONS = {
    "fp16": {
        "wgmma": measured_ceiling(9e14, 7e14),
        "mma.sync": measured_ceiling(6e14, 5.5e14),
    },
    "int8": {"wgmma": measured_ceiling(2e15, 1.6e15)},
    "e4m3": {"wgmma": measured_ceiling(1.9e15, 1.5e15)},
}
MEMORY = {"copy": measured_ceiling(4.25e12, 4.125e12), "L2 reads": measured_ceiling(7e12, 6.5e12)}


def written(folder: Path, ceilings: dict[str, Any], *groups: dict[str, Any]) -> Path:
    """A folder with a record of ceilings and one of times."""
    data = {"record": "bench", "format": 1, "device": "NVIDIA H200 (sm_90)"}
    numbered = {str(at): one for at, one in enumerate(groups)}
    records.write(folder / "bench-nvidia-h200.json", whole(data | {"groups": numbered}))
    records.write(folder / "ceilings-nvidia-h200.json", whole(ceilings))
    return folder


def test_a_record_of_instructions_gives_every_precision_its_floor(tmp_path: Path) -> None:
    """int8 has a floor only if an instruction's rate is recorded, not by a library's rate; fp8 has
    the floor of e4m3's rate."""
    rates = CEILINGS["rates"] | {"int8": {"operations_per_second": 9e14}}
    library = CEILINGS | {"rates": rates}
    both = library | {"instructions": INSTRUCTIONS, "memory": MEMORY}
    groups = [timed(name, 64, cupy=0.5) for name in ("fp32", "fp16", "fp8", "int8")]
    before = lines(
        rendered(block("roofline device=nvidia-h200"), written(tmp_path, library, *groups))
    )
    assert [line.split(" | ")[3] != "" for line in before[2:]] == [True, True, False, False]
    text = rendered(block("roofline device=nvidia-h200"), written(tmp_path, both, *groups))
    ceilings = ceilings_of(both)
    assert (ceilings.rates["int8"], ceilings.rates["fp16"]) == (2e15, 9e14)
    assert ceilings.rate("fp8") == ceilings.rates["e4m3"] == 1.9e15
    for line, name in zip(lines(text)[2:], ("fp32", "fp16", "fp8", "int8"), strict=True):
        floors = limits(
            resnet18(),
            name,
            "all",
            64,
            ceilings,
            fused=("conv2d_maxpool2d",) if name == "fp16" else (),
        ).values()
        expected = sum(one.floor_ms for one in floors)
        assert line.split(" | ")[2:4] == [f"{expected:.4g}"] * 2
    assert (
        "2026-11-21: fp16 900, int8 2,000, e4m3 1,900 TFLOP/s by wgmma in bursts; "
        "fp32 50 TFLOP/s by a library; copy 4.25 TB/s in bursts."
    ) in text


def test_a_program_by_winograd_has_a_floor_of_its_own(tmp_path: Path) -> None:
    """A Winograd program has the lowest floor of its algorithms if steps' kernels are unknown."""
    group = timed("fp32", 64, cupy=4.0)
    ids = ("winograd_f4x4", "winograd_f2x2", "implicit_gemm")
    group["rows"][0]["kernels"] = {f"cupy/conv2d/{name}/fp32": 5 for name in ids}
    text = rendered(block("roofline device=nvidia-h200"), written(tmp_path, CEILINGS, group))
    ceilings = ceilings_of(CEILINGS)
    least = limits(resnet18(), "fp32", "all", 64, ceilings, algorithms=ids).values()
    own = sum(one.floor_ms for one in least)
    direct = floor("fp32", 64)
    assert own < direct
    (line,) = lines(text)[2:]
    assert (
        line == f"| fp32 | 64 | {direct:.4g} | {own:.4g} | 4 | {4 / own:.2f} | — | — |  |  |  | — |"
    )


def test_steps_that_were_recorded_have_the_floors_of_their_kernels() -> None:
    ceilings = ceilings_of(CEILINGS)
    group = timed("fp32", 64, cupy=4.0)
    row = group["rows"][0]
    row["kernels"] = {"cupy/conv2d/winograd_f4x4/fp32": 1, "cupy/conv2d/direct/fp32": 1}
    least = floors_of(row, group, ceilings)
    row["steps"] = [
        {"step": "layer1.0.conv1", "kernel": "cupy/conv2d/winograd_f4x4/fp32", "phase": "input"},
        {"step": "layer1.0.conv1", "kernel": "cupy/conv2d/winograd_f4x4/fp32", "phase": "output"},
        {"step": "layer1.0.conv2", "kernel": "cupy/conv2d/direct/fp32"},
    ]
    found = floors_of(row, group, ceilings)
    direct = limits(resnet18(), "fp32", "all", 64, ceilings)
    assert found["layer1.0.conv1"] == least["layer1.0.conv1"] != direct["layer1.0.conv1"]
    assert found["layer1.0.conv2"] == direct["layer1.0.conv2"] != least["layer1.0.conv2"]
    assert found["layer1.1.conv1"] == least["layer1.1.conv1"]


def test_no_recorded_time_of_ours_is_below_its_floor() -> None:
    """No recorded time is below its own floor; Winograd's are below the direct one in fp32."""
    text = rendered(block("roofline device=nvidia-h200"), ROOT / records.FOLDER)
    rows = [line.strip("| ").split(" | ") for line in lines(text)[2:]]
    floors = [[float(cell) for cell in row[2:5]] for row in rows if row[3].strip()]
    assert len(floors) >= 20
    assert all(least <= time for _, least, time in floors)
    assert any(time < direct for direct, _, time in floors)


def test_a_table_of_ceilings(tmp_path: Path) -> None:
    """A column without numbers is left out, such as those of instructions."""
    marker = block("ceilings device=nvidia-h200")
    library = CEILINGS | {
        "rates": {
            "fp16": {"operations_per_second": 7.5e14, "best": 7.6e14},
            "fp64": {"operations_per_second": 6e13, "best": 6.1e13},
        },
        "copy": {"bytes_per_second": 4e12, "best": 4.1e12},
    }
    text = rendered(marker, written(tmp_path, library))
    assert lines(text) == [
        "| what | unit | library | best |",
        "| --- | --- | --: | --: |",
        "| fp16 | TFLOP/s | 750 | 760 |",
        "| fp64 | TFLOP/s | 60 | 61 |",
        "| copy | TB/s | 4 | 4.1 |",
    ]
    assert "In bursts" not in text
    both = library | {"instructions": INSTRUCTIONS, "memory": MEMORY}
    text = rendered(marker, written(tmp_path, both))
    assert lines(text) == [
        "| what | by | unit | in bursts | best | sustained | best | library | best |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: |",
        "| fp16 | wgmma | TFLOP/s | 900 | 909 | 700 | 707 | 750 | 760 |",
        "| fp16 | mma.sync | TFLOP/s | 600 | 606 | 550 | 555.5 |  |  |",
        "| fp64 |  | TFLOP/s |  |  |  |  | 60 | 61 |",
        "| int8 | wgmma | TOP/s | 2000 | 2020 | 1600 | 1616 |  |  |",
        "| e4m3 | wgmma | TFLOP/s | 1900 | 1919 | 1500 | 1515 |  |  |",
        "| copy |  | TB/s | 4.25 | 4.293 | 4.125 | 4.166 | 4 | 4.1 |",
        "| L2 reads |  | TB/s | 7 | 7.07 | 6.5 | 6.565 |  |  |",
    ]
    assert "In bursts: launches of a few milliseconds" in text


def test_a_table_of_algorithms_and_pytorch(folder: Path) -> None:
    """A contender's batches are columns of one line; an algorithm has its own line."""
    text = rendered(
        block("algorithms device=nvidia-h200 precisions=fp32,fp16 batches=1,64"), folder
    )
    assert lines(text) == [
        "| network by | device | precision | b1 ms/image | images/s | error / PyTorch "
        "| b64 ms/image | images/s | error / PyTorch |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: |",
        "| cupy | nvidia-h200 | fp32 | 0.5 | 2,000 | — | 0.0625 | 16,000 | — |",
        "| cupy (direct) | nvidia-h200 | fp32 | 12.35 | 81 | — |  |  |  |",
        "| cupy | nvidia-h200 | fp16 | 0.25 | 4,000 | — |  |  |  |",
    ]
    assert text.count("medians of 1000 runs") == 1


def test_a_summary_has_a_line_per_precision_with_both_errors(tmp_path: Path) -> None:
    """A precision has a line with both errors, against PyTorch's fastest mode at that batch."""
    eager, fast = "torchvision eager", "torchvision graph, channels-last"
    large = group(64, ("cupy", 0.0625, None), (eager, 0.25, None), (fast, 0.125, None))
    groups = {
        "resnet18/fp16/all/b64": large,
        "resnet18/fp32/all/b64": group(64, ("cupy", 0.5, None)),
        "resnet18/fp32/all/b1": group(1, ("cupy", 1.0, None), (eager, 2.0, None)),
        "resnet18/bf16/all/b64": group(64, ("numba", 1.0, None)),
    }
    head = {"format": 1, "device": "NVIDIA H200 (sm_90)"}
    bench = head | {"record": "bench", "groups": groups}
    ends = [{"relative": 1.0, "own_relative": 1.0}, {"relative": 2e-3, "own_relative": 0.0015}]
    networks = {"cupy/resnet18/fp16/all": {"checkpoints": ends}}
    verified = head | {"record": "verify", "kernels": {}, "networks": networks}
    records.write(tmp_path / "bench-nvidia-h200.json", whole(bench))
    records.write(tmp_path / "verify-nvidia-h200.json", whole(verified))
    text = rendered(block("summary device=nvidia-h200 batch=64"), tmp_path)
    assert lines(text)[2:] == [
        "| fp32 | 2,000 |  |  |  |  |  | — |",
        "| fp16 | 16,000 | 8,000 | graph, channels-last | 2.00× | 2.0e-03 | 1.5e-03 | — |",
    ]
    assert "Where the last column is —, both errors are those of `r18 verify --record`" in text
    ours, theirs, _ = large["rows"]
    ours |= {"error": error(3e-3), "error_ratio": 1.5}
    theirs |= {"error": error(2e-3), "error_ratio": 1.0}
    records.write(tmp_path / "bench-nvidia-h200.json", whole(bench))
    text = rendered(block("summary device=nvidia-h200 batch=64"), tmp_path)
    assert "| 2.00× | 3.0e-03 | 2.0e-03 | 1.50 |" in text
    assert text.count("medians of 1000 runs") == 1
    with pytest.raises(UsageError, match="no time of 'cupy' at batch 8"):
        rendered(block("summary device=nvidia-h200 batch=8"), tmp_path)


def test_a_table_of_algorithms_has_pytorch_eager_and_at_its_fastest(tmp_path: Path) -> None:
    """PyTorch has a line for eager and one for the fastest mode at each batch; libraries do not."""
    eager, compiled = "torchvision eager", "torchvision compile"
    head = {"record": "bench", "format": 1, "device": "NVIDIA H200 (sm_90)"}
    small = group(1, ("cupy", 0.5, None), (eager, 2.0, None), (compiled, 1.0, None))
    large = group(8, (eager, 0.25, None), (compiled, 0.5, None), ("torch", 0.125, None))
    host = group(8, (eager, 8.0, None), ("onnxruntime", 4.0, None))
    for device, groups in (("nvidia-h200", {"b1": small, "b8": large}), ("cpu", {"b8": host})):
        named = {f"resnet18/fp32/all/{name}": data for name, data in groups.items()}
        records.write(tmp_path / f"bench-{device}.json", whole(head | {"groups": named}))
    marker = "algorithms device=nvidia-h200 precisions=fp32 batches=1,8 cpu=cpu"
    assert lines(rendered(block(marker), tmp_path))[2:] == [
        "| PyTorch eager | cpu | fp32 |  |  |  | 8 | 125 | — |",
        "| PyTorch eager | nvidia-h200 | fp32 | 2 | 500 | — | 0.25 | 4,000 | — |",
        "| PyTorch's fastest mode | nvidia-h200 | fp32 | 1 | 1,000 | — | 0.25 | 4,000 | — |",
        "| cupy | nvidia-h200 | fp32 | 0.5 | 2,000 | — |  |  |  |",
    ]


@pytest.fixture
def tuned(measured: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tuning tables that a backend ships now and shipped before."""
    problems = fuse(resnet18(), "all").problems(1)
    conv, narrow = str(problems["layer1.0.conv1"]), str(problems["layer2.0.conv1"])
    stem = str(fuse_pool(fuse(resnet18(), "all")).problems(1)["conv1"])
    now = {
        conv: {1: Timing("cupy/conv2d/new/fp16", 9.0), 8: Timing("cupy/conv2d/new/fp16", 5.0)},
        narrow: {8: Timing("cupy/conv2d/old/fp16/m64", 4.0)},
        str(problems["fc"]): {1: Timing("cupy/linear/new/fp16", 2.0)},
        stem: {8: Timing(APART, 20.0)},
    }
    before = {conv: {8: Timing("cupy/conv2d/old/fp16", 10.0)}, narrow: {1: Timing("x", 1.0)}}
    tuning.Table("NVIDIA H200 (sm_90)", {"fp16": now}).write(measured / "shipped.json")
    old = tuning.Table("NVIDIA H200 (sm_90)", {"fp16": before})
    old.write(measured / "tuned-nvidia-h200-old.json")
    monkeypatch.setattr(tuning, "shipped_table", lambda backend, device: measured / "shipped.json")
    return measured


def test_a_table_of_tuned_kernels_then_and_now(tuned: Path) -> None:
    """Tuned kernels then and now are listed in network order, each problem once, at its batch."""
    ceilings = ceilings_of(CEILINGS)
    floors = {
        pooled: limits(resnet18(), "fp16", "all", 8, ceilings, fused=FUSED[pooled])
        for pooled in (False, True)
    }
    stem, conv, narrow = (
        1e3 * floors[pooled][name].floor_ms
        for pooled, name in ((True, "conv1"), (False, "layer1.0.conv1"), (False, "layer2.0.conv1"))
    )
    marker = "tuned device=nvidia-h200 precision=fp16 batch=8"
    text = rendered(block(f"{marker} before=old"), tuned)
    assert lines(text) == [
        "| steps | floor µs | now µs | now / floor | old µs | old / now | algorithm now |",
        "| --- | --: | --: | --: | --: | --: | --- |",
        f"| conv1 with its max-pooling | {stem:.1f} | 20.0 | {20 / stem:.2f} |  |  | {APART} |",
        "| layer1.0.conv1, layer1.1.conv1 "
        f"| {conv:.1f} | 5.0 | {5 / conv:.2f} | 10.0 | 2.00 | new |",
        f"| layer2.0.conv1 | {narrow:.1f} | 4.0 | {4 / narrow:.2f} |  |  | old |",
    ]
    alone = lines(rendered(block(marker), tuned))
    said = "floors by the ceilings of 2026-11-21: fp16 750 TFLOP/s by a library, copy 4 TB/s"
    assert said in text
    assert alone[0] == "| steps | floor µs | now µs | now / floor | algorithm now |"
    assert len(alone) == 5


def test_the_tables_that_backends_ship_are_found() -> None:
    path = shipped_table("cupy", "nvidia-h200")
    assert path == ROOT / "backends" / "r18_cupy" / "tuned" / "nvidia-h200.json"
    assert path.is_file()
    with pytest.raises(UnknownName, match="did you mean 'cupy'"):
        shipped_table("cupi", "nvidia-h200")


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("roofline device=nvidia-h100", "run r18 roofline --measure on that device"),
        ("roofline device=nvidia-h200 backend=numpy", "has no time of 'numpy'"),
        ("tuned device=nvidia-h200 precision=fp32 batch=8", "has no time in fp32 at batch 8"),
        ("tuned device=nvidia-h200 precision=fp16 batch=all", "batch=all, which is not a number"),
        ("tuned device=nvidia-h200 precision=fp16 batch=0", "batch=0, which is not a number"),
        ("tuned device=nvidia-h200 precision=fp16 batch=8 before=x", "there is no tuning table"),
    ],
)
def test_wrong_markers_of_floors(tuned: Path, marker: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rendered(block(marker), tuned)


# -- the documents -----------------------------------------------------------------------------
def test_a_table_of_mutants(folder: Path) -> None:
    text = rendered(block("mutate devices=nvidia-h200"), folder)
    numbers = "nvidia-h200 | 1,200 | 990 | 10 | 180 | 20 | 0 | 99.00 % |"
    assert lines(text)[2:] == [f"| cupy | {numbers}", f"| numba | {numbers}"]
    assert "\n2026-11-20 to 2026-11-22.\n" in text
    assert len(lines(rendered(block("mutate devices=nvidia-h200 backends=cupy"), folder))) == 3


def test_a_table_of_mutants_has_a_row_for_each_choice_of_files(folder: Path) -> None:
    path = folder / "mutate-nvidia-h200.json"
    data = json.loads(path.read_text())
    run = data["backends"]["cupy"]
    names = MutateSample.__struct_fields__
    sample = {name: run[name] for name in names} | {"mutants": 60, "score": 98.0, "left": 2}
    run["samples"] = {"*integers/*": sample | {"files": "*integers/*", "date": "2026-11-23"}}
    path.write_text(json.dumps(data))
    text = rendered(block("mutate devices=nvidia-h200 backends=cupy"), folder)
    first, second = lines(text)[2:]
    assert first.startswith("| cupy | nvidia-h200 | 1,200 |")
    counts = "60 | 990 | 10 | 180 | 20 | 2 | 98.00 %"
    assert second == f"| cupy, `*integers/*` | nvidia-h200 | {counts} |"
    assert "\n2026-11-20 to 2026-11-23.\n" in text


def test_no_mutant_tried_is_no_score(folder: Path) -> None:
    path = folder / "mutate-nvidia-h200.json"
    data = json.loads(path.read_text())
    run = data["backends"]["cupy"]
    run |= {"mutants": 3, "killed": 0, "survived": 0, "equivalent": 1, "invalid": 2, "left": 4}
    run["score"] = 0.0
    path.write_text(json.dumps(data))
    text = rendered(block("mutate devices=nvidia-h200 backends=cupy"), folder)
    assert lines(text)[2:] == ["| cupy | nvidia-h200 | 3 | 0 | 0 | 1 | 2 | 4 | — |"]


def test_making_tables_again_changes_nothing(folder: Path) -> None:
    text = block("verify device=nvidia-h200") + block("sanitize device=nvidia-h200")
    once = rendered(text, folder)
    assert rendered(once, folder) == once
    assert once.count("\nafter\n") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (block("speed device=x"), "unknown table 'speed'"),
        (block("verify devices=x"), "unknown option of table verify 'devices', did you mean"),
        (block("verify device"), "options are NAME=VALUE, got 'device'"),
        (block("verify"), "lacks device="),
        (block("verify device=nvidia-h100"), "there is no record .*: run r18 verify --record"),
        (block("verify device=nvidia-h200 backend=x"), "has no kernel of 'x'"),
        (block("mutate devices=nvidia-h200 backends=x"), "has mutants of 'x'"),
        (block("bench devices=nvidia-h200 precisions=int8 batches=1"), "has a time of resnet18"),
        ("<!-- table: verify device=nvidia-h200 -->\nrest\n", "not followed by its end"),
    ],
)
def test_wrong_markers(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rendered(text, folder)


def test_the_readmes_tables_are_the_records() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert rendered(text, ROOT / records.FOLDER) == text, "run python tools/make_tables.py"


def test_the_tool_writes_and_checks(folder: Path) -> None:
    document = folder / "page.md"
    document.write_text(block("verify device=nvidia-h200"))

    given = ("--records", str(folder), str(document))
    command = [sys.executable, str(ROOT / "tools" / "make_tables.py"), "--check", *given]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (1, "page.md: differs\n")
    assert "old" in document.read_text()
    assert tool("make_tables", *given).code == 0
    assert "| gap | mean |" in document.read_text()
    assert tool("make_tables", "--check", *given).code == 0
    document.write_text(block("nonsense"))
    assert tool("make_tables", *given).code == 2


def test_a_caption_says_how_far_series_lie_apart() -> None:
    record = json.loads((ROOT / "exports" / "records" / "bench-amd-epyc-avx-512.json").read_text())
    group = next(iter(record["groups"].values()))
    rows = [
        {"backend": "numpy", "kernels": ["a"], "median_ms": 2.0, "series_ms": [1.9, 2.0, 2.1]},
        {"backend": "peer", "kernels": [], "median_ms": 1.0, "series_ms": [1.0, 1.0, 1.01]},
    ]
    series = group | {"series": 3, "repeat": 7, "warmup": 2}
    (said,) = bench_captions([series | {"rows": rows[1:]}, series | {"rows": rows}])
    assert "medians of 3 series of 7 runs after 2 untimed ones" in said
    assert said.endswith(
        "; medians of single series differ by at most 10.0% (r18) and 1.0% (baselines)."
    )
    alone = [row | {"series_ms": [row["median_ms"]]} for row in rows]
    one = group | {"rows": alone}
    assert [said[-13:] for said in bench_captions([one, one])] == ["untimed ones."]


def test_groups_of_one_machine_and_set_of_versions_share_a_caption() -> None:
    record = json.loads((ROOT / "exports" / "records" / "bench-amd-epyc-avx-512.json").read_text())
    group = next(iter(record["groups"].values())) | {"date": "2026-01-02T03:04:05+00:00"}

    def timed(**packages: str) -> dict[str, Any]:
        rows = [{"backend": name, "kernels": [], "median_ms": 1.0} for name in packages]
        installed = {"torch": "1.2", "openvino": "3.4", "onnxruntime": "5.6"} | packages
        environment = group["environment"] | {"packages": installed}
        return group | {"rows": rows, "environment": environment}

    (said,) = bench_captions([timed(openvino="3.4"), timed(onnxruntime="5.6")])
    assert "PyTorch 1.2, ONNX Runtime 5.6, OpenVINO 3.4, 2026-01-02" in said
    (alone,) = bench_captions([timed(openvino="3.4")])
    assert "ONNX Runtime" not in alone, "it was installed, and not timed"
    assert len(bench_captions([timed(openvino="3.4"), timed(openvino="3.5")])) == 2
    later = timed(openvino="3.4") | {"date": "2026-01-03T03:04:05+00:00"}
    (both,) = bench_captions([later, timed(openvino="3.4")])
    assert "OpenVINO 3.4, 2026-01-02 to 2026-01-03: medians of" in both
