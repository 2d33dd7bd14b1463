"""The contenders of a benchmark, how programs are timed, and what a record stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import r18
from pooling_backends import Pooling
from r18.backend import CompileOptions, DeviceInfo
from r18.backend.registry import load_backend
from r18.bench import record as bench_record
from r18.bench.baselines import PEER, PEERS, ways
from r18.bench.contenders import Compiled, algorithm_kernels, contenders
from r18.bench.rows import Row, with_ratios
from r18.bench.timing import bench
from r18.cli.app import REFUSED
from r18.cpu import model_slug
from r18.errors import NoKernel, UnknownName, UsageError
from r18.graph.resnet import resnet18, tiny
from r18.machine import machine
from r18.runtime.plan import make_plan
from r18.weights.synthetic import synthetic_weights

NUMPY = load_backend("numpy")


class Gpu:
    """NumPy's kernels in a backend that reports a GPU."""

    name = "gpu"
    kernels = staticmethod(NUMPY.kernels)

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cuda", "NVIDIA H200 (sm_90)")


# -- algorithms --------------------------------------------------------------------------------


def test_an_algorithm_takes_the_steps_that_it_can() -> None:
    options = CompileOptions(batch=2, fusion="conv_bn_relu")
    chosen = algorithm_kernels(NUMPY, resnet18(), ("conv2d", "direct"), options)
    assert len(chosen) == 20
    assert set(chosen.values()) == {"numpy/conv2d/direct/fp32"}
    by_id = algorithm_kernels(NUMPY, resnet18(), ("conv2d", "*/direct/*"), options)
    assert by_id == chosen


def test_the_preferred_kernel_keeps_the_steps_that_an_algorithm_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that an algorithm refuses keep their preferred kernel; here it takes 3x3, stride 1."""
    direct = next(k for k in NUMPY.kernels() if k.id == "numpy/conv2d/direct/fp32")

    def only_3x3(self: Any, problem: Any) -> str | None:
        refused = problem.op.kernel_size != (3, 3) or problem.op.stride != (1, 1)
        return "3x3 of stride 1 only" if self is direct and refused else None

    monkeypatch.setattr(type(direct), "refusal", only_3x3)
    schedule, options = resnet18(), CompileOptions()
    chosen = algorithm_kernels(NUMPY, schedule, ("conv2d", "direct"), options)
    assert len(chosen) == 13
    assert {"layer1.0.conv1", "layer4.1.conv2"} <= chosen.keys()
    assert not {"conv1", "layer2.0.conv1", "layer2.0.downsample.0"} & chosen.keys()


def test_an_algorithm_of_the_fused_stem_or_of_its_parts_is_what_runs() -> None:
    options, backend = CompileOptions(), Pooling()
    for op, stem in (
        ("conv2d_maxpool2d", ["faulty/conv2d_maxpool2d/plain/fp32"]),
        ("conv2d", ["faulty/conv2d/plain/fp32", "faulty/maxpool2d/plain/fp32"]),
        ("maxpool2d", ["faulty/conv2d/plain/fp32", "faulty/maxpool2d/plain/fp32"]),
    ):
        chosen = algorithm_kernels(backend, tiny(), (op, "plain"), options)
        assert ("conv1" in chosen) == (op != "maxpool2d")
        plan = make_plan(backend, tiny(), CompileOptions(kernels=chosen))
        assert [step.kernel.id for step in plan.steps[: len(stem)]] == stem


def test_an_algorithm_without_a_kernel_in_the_precision_is_left_out() -> None:
    with pytest.raises(NoKernel, match="no step of 'tiny' in int8 has a kernel of conv2d=direct"):
        algorithm_kernels(NUMPY, tiny(), ("conv2d", "direct"), CompileOptions(precision="int8"))


def test_algorithms_are_contenders_beside_the_backend() -> None:
    network = tiny()
    field = contenders(
        {"numpy": NUMPY},
        network,
        synthetic_weights(network),
        algorithms=[("conv2d", "direct"), ("gap", "mean")],
    )
    assert [c.name for c in field] == ["numpy", "numpy (direct)", "numpy (mean)", PEER]
    assert [c.required for c in field] == [True, False, False, False]
    preferred, direct, _ = bench(field, warmup=0, repeat=1)
    assert (preferred.algorithm, direct.algorithm) == ("", "conv2d=direct")
    assert "numpy/conv2d/im2col/fp32" in preferred.kernels
    convolutions = [k for k in direct.kernels if k.startswith("numpy/conv2d/")]
    assert convolutions == ["numpy/conv2d/direct/fp32"]
    assert sum(direct.kernels.values()) == sum(preferred.kernels.values())


def test_an_algorithm_that_no_backend_has_is_an_error() -> None:
    with pytest.raises(UnknownName, match=r"unknown algorithm of conv2d 'dirct', did you mean"):
        contenders({"numpy": NUMPY}, tiny(), {}, algorithms=[("conv2d", "dirct")])
    with pytest.raises(UnknownName, match="unknown op of an algorithm 'conv3d'"):
        contenders({"numpy": NUMPY}, tiny(), {}, algorithms=[("conv3d", "direct")])


def test_each_kind_of_device_has_its_peers() -> None:
    gpu: Any = Gpu()
    field = contenders({"numpy": NUMPY, "gpu": gpu}, tiny(), {}, peers="all")
    peers = [(c.device.kind, c.name) for c in field if c.name in PEERS]
    assert peers == [
        *(("cpu", name) for name in (PEER, "onnxruntime", "openvino")),
        *(("cuda", way.name) for way in ways("all", ["cuda"])["cuda"]),
    ]
    assert len(peers) == 3 + 6


def test_split_products_share_the_peers_of_float32() -> None:
    gpu: Any = Gpu()
    field = contenders(
        {"gpu": gpu}, tiny(), {}, precisions=("fp32", "fp16x3", "tf32"), peers="eager,graph"
    )
    peers = [c for c in field if c.name in PEERS]
    by_precision = {
        name: [c for c in peers if c.precision == name] for name in ("fp32", "fp16x3", "tf32")
    }
    assert [c.twin for c in by_precision["fp16x3"]] == by_precision["fp32"]
    assert all(c.twin is None for c in (*by_precision["fp32"], *by_precision["tf32"]))


# -- timing a program --------------------------------------------------------------------------


class Streamed:
    """A program whose stream logs what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.profile = self.close = lambda: None
        self.stream = self

    def record(self) -> Streamed:
        self.log.append("event")
        return self

    def milliseconds_since(self, earlier: Streamed) -> float:
        return 1.25

    def launch(self) -> None:
        self.log.append("launch")

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_on_a_gpu_a_program_is_timed_by_events_of_its_stream() -> None:
    program: Any = Streamed()
    runner = Compiled(program, "cuda")
    assert runner.time(lambda: pytest.fail("the host's clock was read")) == 1.25
    assert program.log == ["event", "launch", "event", "synchronize"]


def test_on_a_cpu_a_program_is_timed_by_the_clock() -> None:
    program: Any = Streamed()
    ticks = iter([1.0, 1.5])
    assert Compiled(program, "cpu").time(lambda: next(ticks)) == 500.0
    assert program.log == ["launch", "synchronize"]


def test_programs_say_which_stream_they_use() -> None:
    network = tiny()
    program = NUMPY.compile(network, synthetic_weights(network), CompileOptions())
    assert program.stream.record().milliseconds_since(program.stream.record()) <= 0


# -- the record --------------------------------------------------------------------------------


def timed(name: str, ms: float, batch: int = 1, precision: str = "fp32") -> Row:
    device = "NVIDIA H200, PyTorch 2" if name in PEERS else "NVIDIA H200 (sm_90)"
    return Row(name, device, "cuda", precision, "all", batch, 50, 3, (ms, ms, ms))


def field_of(rows: list[Row]) -> Any:
    from r18.bench.rows import Contender

    return [
        Contender(r.backend, DeviceInfo(r.device_kind, r.device), r.precision, "", (1,), list)  # type: ignore[arg-type]
        for r in reversed(rows)
    ]


def save(folder: Path, *rows: Row) -> dict[str, Any]:
    weights = {"source": "synthetic:0", "sha256": "s"}
    about = {"network": "resnet18", "weights": weights, "machine": machine(), "skipped": []}
    found = with_ratios(rows)
    (path,) = bench_record.save(found, field_of(found), about, "all", folder)
    assert path == folder / "bench-nvidia-h200.json"
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_a_record_has_a_group_for_what_took_turns(tmp_path: Path) -> None:
    record = save(
        tmp_path, timed("cupy", 1.0), timed(PEER, 4.0), timed("cupy", 8.0, 64), timed(PEER, 8.0, 64)
    )
    assert record["device"] == "NVIDIA H200 (sm_90)"
    assert list(record["groups"]) == ["resnet18/fp32/all/b1", "resnet18/fp32/all/b64"]
    small, large = record["groups"].values()
    assert [row["backend"] for row in small["rows"]] == ["cupy", PEER]
    assert (small["rows"][0]["ratio"], small["rows"][0]["best_peer"]) == (0.25, PEER)
    assert (large["batch"], large["warmup"], large["repeat"]) == (64, 50, 3)
    assert large["rows"][0]["ms_per_image"] == 0.125
    assert "samples_ms" not in small["rows"][0]
    assert small["environment"]["device"]["name"] == "NVIDIA H200 (sm_90)"


def test_a_run_replaces_whole_groups_and_no_others(tmp_path: Path) -> None:
    save(tmp_path, timed("cupy", 1.0), timed("old", 1.0), timed("cupy", 8.0, 64))
    record = save(tmp_path, timed("cupy", 2.0), timed("cupy", 1.0, precision="fp16"))
    rows = {name: group["rows"] for name, group in record["groups"].items()}
    assert list(rows) == ["resnet18/fp16/all/b1", "resnet18/fp32/all/b1", "resnet18/fp32/all/b64"]
    assert [(r["backend"], r["median_ms"]) for r in rows["resnet18/fp32/all/b1"]] == [("cupy", 2.0)]
    assert rows["resnet18/fp32/all/b64"][0]["median_ms"] == 8.0


def test_the_command_line_writes_one(tmp_path: Path) -> None:
    done = r18(
        *("bench", "--backends", "numpy", "--network", "tiny", "--batch", "1", "--warmup", 0),
        *("--repeat", 2, "--algorithms", "conv2d=all", "--record", "--records", tmp_path),
    )
    assert done.code == 0, done.err
    assert f"recorded in {tmp_path}/bench-{model_slug()}.json" in done.err
    (group,) = json.loads((tmp_path / f"bench-{model_slug()}.json").read_text())["groups"].values()
    assert [row["backend"] for row in group["rows"]] == [
        "numpy",
        "numpy (im2col)",
        "numpy (direct)",
    ]
    assert group["skipped"][0]["reason"] == "torchvision has no 'tiny'"
    assert group["machine"]["cpus"] >= 1
    assert group["weights"]["source"] == "synthetic:0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--algorithms", "direct"), "--algorithms takes OP=ALGORITHM"),
        (("--algorithms", "conv2d=none"), "unknown algorithm of conv2d 'none'"),
        (("--peers", "eagre"), "did you mean 'eager'"),
    ],
)
def test_wrong_requests(options: tuple[str, ...], message: str) -> None:
    done = r18("bench", "--backends", "numpy", "--network", "tiny", *options)
    assert done.code == REFUSED
    assert message in done.err


def test_a_damaged_record_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "bench-nvidia-h200.json"
    path.write_text('{"network": "resnet18"}')
    with pytest.raises(UsageError, match="no bench record"):
        save(tmp_path, timed("cupy", 1.0))
