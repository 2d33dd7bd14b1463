"""The list of peers, and torchvision's on CUDA with a stand-in for the device: what is built,
and what is timed, when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # whole, before a stand-in takes the place of what it imports

from r18.backend import CompileOptions
from r18.backend.registry import load_backend
from r18.bench.baselines import PEER, PEERS, WAYS, Way, ways
from r18.bench.baselines.torchvision import BUILD_RUNS, Torchvision
from r18.bench.timing import random_images
from r18.errors import UnknownName, UsageError
from r18.graph.resnet import resnet18
from support import random_weights

NETWORK = resnet18(image_size=64, classes=12)
WEIGHTS = random_weights(NETWORK)


class Device:
    """PyTorch's CUDA, as far as the peers use it: logs its calls, computes on the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.captured: list[Any] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.log.append("event")

            def synchronize(self) -> None:
                device.log.append("wait for event")

            def elapsed_time(self, later: Event) -> float:
                return 2.5

        class Graph:
            def replay(self) -> None:
                device.log.append("replay")

        class Stream:
            def wait_stream(self, other: object) -> None:
                device.log.append("wait for stream")

        @contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            device.log.append("capture")
            yield
            device.log.append("captured")

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            yield

        def compiled(module: Any, **options: Any) -> Any:
            device.log.append(f"compile {sorted(options.items())}")
            return module

        for name, stand_in in {
            "is_available": lambda: True,
            "synchronize": lambda: device.log.append("synchronize"),
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "current_stream": Stream,
            "graph": capture,
            "stream": on,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch, "compile", compiled)
        patch.setattr("r18.bench.baselines.torchvision.place", lambda kind: "cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    found.install(monkeypatch)
    return found


def peer_of(device: Device, way: Way, precision: str = "fp32") -> Torchvision:
    """A peer that logs each call of its module."""
    peer = Torchvision("cuda", NETWORK, WEIGHTS, precision, way)
    peer._module.register_forward_pre_hook(lambda module, x: device.log.append("module"))
    return peer


IMAGES = random_images((2, 3, 64, 64), 2)
ON_CUDA = tuple(way for way in WAYS if way.mode in ("eager", "graph", "compile"))


# -- which -------------------------------------------------------------------------------------


def test_ways_to_run() -> None:
    assert PEERS[0] == PEER == "torchvision eager"
    assert len(set(PEERS)) == 8
    exported = (Way("onnxruntime"), Way("openvino"))
    assert ways("all", ["cuda", "cpu"]) == {"cuda": ON_CUDA, "cpu": (Way(), *exported)}
    assert ways("eager", ["cuda", "cpu"]) == {"cuda": (Way(),), "cpu": (Way(),)}
    assert ways("eager,graph,compile", ["cuda"]) == {"cuda": ON_CUDA}
    assert [way.name for way in ways("graph", ["cuda"])["cuda"]] == [
        "torchvision eager",
        "torchvision graph",
        "torchvision graph, channels-last",
    ]
    assert ways("eager,openvino", ["cuda", "cpu"]) == {
        "cuda": (Way(),),
        "cpu": (Way(), Way("openvino")),
    }
    assert ways("all", []) == {}
    with pytest.raises(UnknownName, match="did you mean 'graph'"):
        ways("graf", ["cuda"])
    with pytest.raises(UsageError, match="twice"):
        ways("graph,graph", ["cuda"])


def test_what_suits_no_device_is_only_there_when_it_was_named() -> None:
    """A way that suits no device appears only if it is named, and then reports why it fails."""
    assert ways("graph", ["cpu"]) == {"cpu": (Way(), Way("graph"))}
    assert ways("onnxruntime", ["cuda"]) == {"cuda": (Way(), Way("onnxruntime"))}
    assert ways("onnxruntime", ["cuda", "cpu"])["cuda"] == (Way(),)
    assert Way("graph") not in ways("all", ["cpu"])["cpu"]
    assert ways("eager", ["npu"]) == {"npu": (Way(),)}


# -- what is built and timed -------------------------------------------------------------------


def test_eager_is_timed_by_events_around_a_call(device: Device) -> None:
    peer = peer_of(device, Way())
    peer.load(IMAGES[0])
    assert device.log == ["synchronize"]
    device.log.clear()
    assert peer.time(lambda: pytest.fail("the host's clock was read")) == 2.5
    assert device.log == ["event", "module", "event", "wait for event"]


def test_a_graph_is_captured_once_before_anything_is_timed(device: Device) -> None:
    peer = peer_of(device, Way("graph"))
    peer.load(IMAGES[0])
    settled = ["wait for stream", *["module"] * BUILD_RUNS, "wait for stream"]
    assert device.log == [*settled, "capture", "module", "captured", "synchronize"]
    address = peer._images.data_ptr()
    device.log.clear()
    peer.load(IMAGES[1])
    peer.run()
    peer.time(lambda: 0.0)
    assert device.log == [
        *("synchronize", "replay", "synchronize"),
        *("event", "replay", "event", "wait for event"),
    ]
    assert peer._images.data_ptr() == address  # what the graph reads
    assert np.array_equal(peer._images.numpy(), IMAGES[1])


def test_compiling_comes_before_anything_is_timed(device: Device) -> None:
    peer = peer_of(device, Way("compile"))
    peer.load(IMAGES[0])
    options = [("dynamic", False), ("fullgraph", True), ("mode", "reduce-overhead")]
    assert device.log[0] == f"compile {options}"
    assert device.log.count("module") == BUILD_RUNS
    device.log.clear()
    peer.load(IMAGES[1])
    peer.time(lambda: 0.0)
    assert device.log == ["synchronize", "event", "module", "event", "wait for event"]


@pytest.mark.parametrize("way", ON_CUDA, ids=lambda way: way.name)
def test_every_way_computes_the_network_in_its_layout(device: Device, way: Way) -> None:
    peer = peer_of(device, way)
    peer.load(IMAGES[0])
    peer.load(IMAGES[1])
    if way.mode != "graph":
        peer.run()
        program = load_backend("numpy").compile(NETWORK, WEIGHTS, CompileOptions(batch=2))
        expected = program(IMAGES[1])
        error = np.abs(peer.fetch() - expected).max()
        assert error < 1e-5 * np.abs(expected).max()
    layout = torch.channels_last if way.channels_last else torch.contiguous_format
    assert peer._images.is_contiguous(memory_format=layout)
    assert peer._module.layer1[0].conv1.weight.is_contiguous(memory_format=layout)
    assert np.array_equal(peer._images.numpy(), IMAGES[1])


# -- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "tf32", "dtype"),
    [
        ("fp32", False, torch.float32),
        ("fp16x3", False, torch.float32),
        ("tf32", True, torch.float32),
        ("fp16", False, torch.float16),
        ("bf16", False, torch.bfloat16),
    ],
)
def test_each_precision_has_its_switches_and_dtype(
    device: Device, precision: str, tf32: bool, dtype: torch.dtype
) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32)
    peer = peer_of(device, Way(), precision)
    peer.load(IMAGES[0])
    assert (cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32) == (tf32, True, tf32)
    assert {p.dtype for p in peer._module.parameters()} == {dtype}
    assert peer._images.dtype == dtype
    peer.run()
    assert peer.fetch().dtype == np.float32  # NumPy has no bfloat16
    peer.close()
    assert (cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32) == before


def test_peers_of_two_precisions_taking_turns_keep_their_switches(device: Device) -> None:
    exact, fast = peer_of(device, Way(), "fp32"), peer_of(device, Way(), "tf32")
    seen = []
    for peer in (exact, fast, exact):
        peer.load(IMAGES[0])
        seen.append(torch.backends.cudnn.allow_tf32)
    assert seen == [False, True, False]
    for peer in (fast, exact):
        peer.close()
