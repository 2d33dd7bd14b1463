"""Time one persistent kernel against the graph of launches: ResNet-18, fp16, one image.

python tools/experiments/megakernel/megakernel.py [--quick]

Both start with the same stem's launch and end with logits. Checks every variant's layers and
logits, then times them in turns. Needs a GPU of compute capability 9.0; takes less than a minute.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np
import torch
from cuda.bindings import driver, nvrtc
from cupy.cuda import driver as cupy_driver
from table import Plan, Work, check_work, fused_schedule, make_work

from check import HERE, NETWORK, layer_errors, macros, reference, relative
from r18.backend import CompileOptions, download, enqueue_all, upload
from r18.backend.registry import get_backend
from r18.graph.passes import fold_weights
from r18.graph.resnet import network
from r18.weights import load_weights
from r18_cupy.cuda import compiler

ROUNDS, REPLAYS, WARMUP, SINGLES = 20, 200, 50, 100
STAMPED_RUNS = 30
POINTS = 6


NARROW, WIDE = Plan(), Plan(wide=(28, 14, 7))


@dataclass(frozen=True)
class Variant:
    """A megakernel. probe: polls of everything before one chunk stands for the rest."""

    name: str
    plan: Plan = NARROW
    stages: int = 3
    probe: int = 3
    overlaps: bool = True
    stamps: int = 0


VARIANTS = [
    Variant("132 CTAs"),
    Variant("probe at once", probe=1),
    Variant("probe never", probe=1 << 30),
    Variant("32 channels x 64", WIDE),
    Variant("32 x 64 in layer 4", Plan(wide=(7,))),
    Variant("32 x 64 in layers 3, 4", Plan(wide=(14, 7))),
    Variant("2 items of weights ahead", stages=2),
    Variant("no overlap with the stem", overlaps=False),
    Variant("66 CTAs", Plan(66)),
]
STAMPED = [Variant("stamps", stamps=1), Variant("stamps, 32 x 64", WIDE, stamps=1)]


def compiled(defines: dict[str, int]) -> compiler.Binary:
    options = [
        "-std=c++17",
        "-arch=sm_90a",
        "--ptxas-options=-v",
        f"-I{HERE}",
        *(f"-I{folder}" for folder in compiler._include_paths()),
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]
    source = (HERE / "megakernel.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, b"megakernel.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = compiler._log(program)
    if int(status):
        raise SystemExit(log)
    return compiler.Binary("megakernel", compiler._output(program, "CUBIN"), log)


class Mega:
    """A variant on the device."""

    def __init__(self, variant: Variant, work: Work, binary: compiler.Binary, stem: Any) -> None:
        self.variant, self.work, self.stem = variant, work, stem
        self.shared = work.shared_nbytes(variant.stages)
        self.module = cupy.cuda.function.Module()
        self.module.load(binary.cubin)
        self.function = self.module.get_function("megakernel")
        cupy_driver.funcSetAttribute(self.function.ptr, 8, self.shared)
        ctas = work.plan.ctas
        self.arrays = {
            "items": cupy.asarray(work.table.view(np.uint8)),
            "counts": cupy.asarray(work.counts),
            "weights": cupy.asarray(np.concatenate(work.weights)),
            "biases": cupy.asarray(np.concatenate(work.biases)),
            "arena": cupy.full(2 * work.half_nbytes, 255, cupy.uint8),
            "logits": cupy.zeros(work.features, cupy.float16),
            "epochs": cupy.zeros(ctas, cupy.uint32),
            "trouble": cupy.zeros(4, cupy.uint32),
            "stamps": cupy.zeros((ctas, work.most_items + 1, POINTS), cupy.uint64),
        }
        self.network = np.zeros(1, NETWORK)
        for name, array in self.arrays.items():
            self.network[name] = array.data.ptr
        self.network["stem"] = stem.data.ptr
        self.network["half_bytes"], self.network["features"] = work.half_nbytes, work.features
        self.places = np.array([self.network.ctypes.data], np.uint64)
        cupy.cuda.Device().synchronize()

    def enqueue(self, stream: Any, overlaps: bool) -> None:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.work.plan.ctas, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 256, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = driver.CUstream(stream.cuda.ptr)
        if overlaps:
            attribute = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        function = driver.CUfunction(self.function.ptr)
        (status,) = driver.cuLaunchKernelEx(config, function, int(self.places.ctypes.data), 0)
        if int(status):
            raise SystemExit(f"{self.variant.name}: {status.name}")

    def ends(self) -> bool:
        """Whether no thread has given up; says which one has."""
        trouble = self.arrays["trouble"].get()
        if trouble[0]:
            print(
                f"{self.variant.name}: CTA {trouble[1]}, thread {trouble[3]} gave up at "
                f"{trouble[2]} (item, + 1000 for parts, 2000 for a residual, 3000 for means)",
                flush=True,
            )
        return not trouble[0]

    def half(self) -> np.ndarray:
        """The half of the arena that the last run wrote."""
        which = (int(self.arrays["epochs"][0]) - 1) % 2
        n = self.work.half_nbytes
        return self.arrays["arena"][which * n : (which + 1) * n].get()


def microseconds(run: Callable[[], None], stream: Any, count: int) -> float:
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(stream.cuda)
    for _ in range(count):
        run()
    end.record(stream.cuda)
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) * 1e3 / count


def show_stamps(mega: Mega, runs: list[np.ndarray]) -> None:
    """When each layer is complete, and what its CTAs spent their time on: medians of all runs."""
    work = mega.work
    stages: dict[str, list[tuple[int, int]]] = {}
    for cta, names in enumerate(work.names):
        for n, name in enumerate(names):
            stages.setdefault(name, []).append((cta, n))
    print(f"\n{mega.variant.name}: microseconds, since the wait for the stem ended")
    print(
        "layer                  items   done  since |  load  barrier products  finish  (medians "
        "of CTAs)"
    )
    table = np.array(runs).astype(np.int64)  # [run][cta][item][point]
    start = table[:, :, -1, 1].max(1)
    before = latest = np.zeros(len(runs))
    for name in [*(layer.name for layer in work.layers), "fc"]:
        places = stages[name]
        if "downsample" not in name:  # which is in the same stage as the layer before it
            before = latest
        at = np.array([[run[cta, n] for cta, n in places] for run in table])  # [run][item][point]
        at = at - start[:, None, None]  # before any float: the clock has 61 bits
        done = at[..., 4].max(1)
        spans = [np.median(at[..., b] - at[..., a]) for a, b in ((0, 1), (1, 2), (2, 3), (3, 4))]
        if name == "fc":
            spans = [spans[0], 0, 0, np.median(at[..., 4] - at[..., 1])]
        text = " ".join(f"{span / 1e3:8.2f}" for span in spans)
        since = np.median(done - before)
        print(f"{name:22} {len(places):5} {np.median(done) / 1e3:7.2f} {since / 1e3:6.2f} |{text}")
        latest = np.maximum(latest, done)
    ends = table[:, :, -1, :]
    print(
        "from the first CTA's prologue to the stem's end, to the last CTA's end:",
        *(
            f"{np.median(v) / 1e3:.2f}"
            for v in (start - ends[..., 0].min(1), ends[..., 2].max(1) - ends[..., 0].min(1))
        ),
    )
    steps = np.unique(table)
    print("resolution of the timer:", np.diff(steps[steps > 0]).min(initial=10**9), "ns")


def main() -> None:
    begun = time.time()
    quick = "--quick" in sys.argv
    variants = VARIANTS[:1] if quick else VARIANTS
    print(
        subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=name,clocks.sm,clocks.max.sm,driver_version",
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    schedule, plain = fused_schedule(), network("resnet18")
    weights = load_weights("synthetic", plain)
    folded = fold_weights(schedule, weights)
    works = {}
    for variant in [*variants, *STAMPED]:
        if variant.plan not in works:
            works[variant.plan] = make_work(variant.plan, schedule, weights)
    check_work(works[NARROW])
    everything = [*variants, *STAMPED]
    with ThreadPoolExecutor(8) as pool:
        binaries = list(
            pool.map(
                lambda v: compiled(macros(works[v.plan], v.stages, v.probe, v.stamps)), everything
            )
        )
    print(f"{time.time() - begun:.1f} s: compiled", binaries[0].resources)

    backend = get_backend("cupy")
    program = backend.compile(plain, weights, CompileOptions(batch=1, precision="fp16"))
    print(f"{time.time() - begun:.1f} s: the program of launches is ready")
    stream = backend.stream()
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    source = program.plan.tensors[program.plan.schedule.input]
    pixels = backend.memory.empty(source.nbytes)
    upload(backend.memory, image, source.layout, source.dtype, pixels)
    launches = program._reading(pixels, program._launches)
    stem_memory = backend.memory.empty(launches[0].output.nbytes)
    stem = stem_memory.as_array((56, 56, 64), np.dtype(np.float16))
    first = replace(launches[0], output=stem_memory)

    runs: dict[str, Callable[[], None]] = {
        "graph of launches": stream.capture(lambda: enqueue_all(launches, stream)),
        "stem only": stream.capture(lambda: first.enqueue(stream)),
    }
    runs["graph of launches"]()
    stream.synchronize()
    target = program.plan.tensors[program.plan.schedule.output]
    base = download(backend.memory, launches[-1].output, target.shape, target.layout, target.dtype)
    exact = reference(image, folded, schedule, torch.float64, False)["fc"].numpy()
    print(
        f"{time.time() - begun:.1f} s: error of the launches' logits against float64: "
        f"{relative(base, exact):.2e}"
    )

    megas = {}
    for variant, binary in zip(everything, binaries, strict=True):
        mega = megas[variant.name] = Mega(variant, works[variant.plan], binary, stem)

        def both(mega: Mega = mega) -> None:
            first.enqueue(stream)
            mega.enqueue(stream, mega.variant.overlaps)

        both()
        stream.synchronize()
        ended = mega.ends()
        worst = layer_errors(mega.work, mega.half(), stem.get(), folded)
        logits = mega.arrays["logits"].get()[None]
        bad = {name: f"{error:.1e}" for name, error in worst.items() if not error < 2e-3}
        if not ended:
            print(f"errors of its layers: {worst}", flush=True)
            del megas[variant.name]
            continue
        run = stream.capture(both)
        for _ in range(WARMUP):
            run()
        stream.synchronize()
        if not mega.ends():
            del megas[variant.name]
            continue
        again = mega.arrays["logits"].get()[None]
        print(
            f"{variant.name}: shared {mega.shared}, error against the launches "
            f"{relative(logits, base):.2e}, float64 {relative(logits, exact):.2e}, worst layer "
            f"{max(worst.values()):.1e}, same after {WARMUP} replays: "
            f"{bool((logits == again).all())}{f', WRONG: {bad}' if bad else ''}",
            flush=True,
        )
        if not variant.stamps:
            runs[variant.name] = run
        else:
            found = []
            for _ in range(STAMPED_RUNS):
                run()
                stream.synchronize()
                found.append(mega.arrays["stamps"].get())
            show_stamps(mega, found)
    alone = megas.get(VARIANTS[0].name)
    if alone is not None:
        runs["132 CTAs without stem"] = stream.capture(lambda: alone.enqueue(stream, False))
    print(f"\n{time.time() - begun:.1f} s: all checked, timing")

    for run in runs.values():
        microseconds(run, stream, WARMUP)
    loops: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            loops[name].append(microseconds(runs[name], stream, REPLAYS))
    singles: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(SINGLES):
        for name, run in runs.items():
            stream.synchronize()
            singles[name].append(microseconds(run, stream, 1))
    for mega in megas.values():
        again = mega.arrays["logits"].get()[None]
        if not mega.ends() or not relative(again, base) < 2e-2:
            print(f"{mega.variant.name}: WRONG after all replays, {relative(again, base)}")
    reference_time = statistics.median(loops["graph of launches"])
    print(
        f"{time.time() - begun:.1f} s: done. Microseconds: {ROUNDS} rounds of {REPLAYS} replays; "
        f"median of {SINGLES} single replays on an idle device"
    )
    print(f"{'':26} {'median':>8} {'least':>8} {'most':>8} {'ratio':>6} {'single':>8}")
    for name, times in loops.items():
        median = statistics.median(times)
        print(
            f"{name:26} {median:8.2f} {min(times):8.2f} {max(times):8.2f} "
            f"{median / reference_time:6.3f} {statistics.median(singles[name]):8.2f}"
        )


if __name__ == "__main__":
    main()
