"""Tables from records: what they say, and that README.md's are the records'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r18 import records
from r18.errors import UsageError
from r18.tables import rendered
from support import ROOT

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
        records.write(path, {"record": what, **device, **data})
    return tmp_path


def block(marker: str, body: str = "old\n") -> str:
    return f"before\n<!-- table: {marker} -->\n{body}<!-- /table -->\nafter\n"


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_a_table_of_times(folder: Path) -> None:
    marker = "bench devices=nvidia-h200 precisions=fp32,fp16 batches=1,64"
    text = rendered(block(marker), folder)
    assert lines(text) == [
        "| backend | device | precision | batch | ms/image | images/s | / PyTorch | / best peer |",
        "| --- | --- | --- | --: | --: | --: | --: | --: |",
        "| cupy | nvidia-h200 | fp32 | 1 | 0.5 | 2,000 | 0.25 | 0.25 |",
        "| cupy (direct) | nvidia-h200 | fp32 | 1 | 12.35 | 81 | 6.20 | 6.20 |",
        "| cupy | nvidia-h200 | fp32 | 64 | 0.0625 | 16,000 |  |  |",
        "| cupy | nvidia-h200 | fp16 | 1 | 0.25 | 4,000 | 0.50 | 0.50 |",
    ]
    caption = "NVIDIA H200 (sm_90), PyTorch 2.11.0, driver 580.1, 2026-11-20: medians of 1000 runs"
    assert text.count(caption) == 1
    assert text.startswith(f"before\n<!-- table: {marker} -->\n")
    assert text.endswith("<!-- /table -->\nafter\n")
    assert "old" not in text


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
    records.write(tmp_path / "bench-cpu.json", data)
    text = rendered(block("bench devices=cpu precisions=fp32 batches=1,8"), tmp_path)
    head, _, ours, peer = lines(text)
    assert head.endswith("| / PyTorch | / best peer | peak MB |")
    assert ours == "| numpy | cpu | fp32 | 8 | 4 | 250 | 1.50 | 1.50 | 1,235 |"
    assert peer == "| onnxruntime | cpu | fp32 | 8 | 2 | 500 | 0.75 | 0.75 |  |"
    words = "EPYC, 2 threads, PyTorch 2.11.0, ONNX Runtime 1.20, 2026-11-20"
    assert words in text  # OpenVINO is installed and was not timed


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


def test_a_table_of_mutants(folder: Path) -> None:
    text = rendered(block("mutate devices=nvidia-h200"), folder)
    numbers = "nvidia-h200 | 1,200 | 990 | 10 | 180 | 20 | 0 | 99.00 % |"
    assert lines(text)[2:] == [f"| cupy | {numbers}", f"| numba | {numbers}"]
    assert "\n2026-11-20 to 2026-11-22.\n" in text
    assert len(lines(rendered(block("mutate devices=nvidia-h200 backends=cupy"), folder))) == 3


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
        (block("verify"), "does not say device="),
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

    def tool(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools" / "make_tables.py"), *options]
        return subprocess.run(
            [*command, "--records", str(folder), str(document)],
            capture_output=True,
            text=True,
            check=False,
        )

    checked = tool("--check")
    assert (checked.returncode, checked.stdout) == (1, "page.md: differs\n")
    assert "old" in document.read_text()
    assert tool().returncode == 0
    assert "| gap | mean |" in document.read_text()
    assert tool("--check").returncode == 0
    document.write_text(block("nonsense"))
    assert tool().returncode == 2
