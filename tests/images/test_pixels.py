"""Programs that take pixels: their plans, and that they normalise as the host does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import r18_numpy
import r18_torch
from faults import FAULTS, HostBackend
from r18.backend import Backend, CompileOptions
from r18.backend.registry import get_backend
from r18.errors import NoKernel, ScheduleError, ShapeError, UsageError
from r18.graph.ops import Layout, Normalize, ReLU
from r18.graph.passes import FUSION_LEVELS, from_pixels, fuse
from r18.graph.resnet import tiny
from r18.graph.schedule import Schedule, Step
from r18.images.preprocess import Preprocess, preprocess_image
from r18.runtime.fusing import schedule_for
from r18.runtime.plan import make_plan
from r18.weights import load_weights
from r18_cupy.catalogue import all_kernels as cupy_kernels
from r18_oracle.network.checkpoints import compare_checkpoints, seeded_pixels
from support import Array, bytes_of, random_weights

SCHEDULE = tiny()
WEIGHTS = random_weights(SCHEDULE)
BATCH = 3
IMAGENET = Preprocess.for_image_size(32)
PIXELS = IMAGENET.normalize
BACKENDS = {"numpy": r18_numpy.Backend, "torch": r18_torch.cpu}


def preprocessed(pixels: Array) -> Array:
    """Pixels (N, C, H, W) normalised by `r18.images.preprocess`."""
    same = Preprocess(32, 32, IMAGENET.mean, IMAGENET.std)
    return np.stack(
        [preprocess_image(Image.fromarray(image), same) for image in pixels.transpose(0, 2, 3, 1)]
    )


def options(**others: object) -> CompileOptions:
    return CompileOptions(BATCH, pixels=PIXELS, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", FUSION_LEVELS)
@pytest.mark.parametrize("name", [*BACKENDS, "numba-cpu"])
def test_a_program_of_pixels_computes_what_the_host_would_preprocess(name: str, level: str) -> None:
    backend = get_backend(name)
    pixels = bytes_of(SCHEDULE, BATCH)
    taps = ("stem_pool", "image")
    plain = backend.compile(SCHEDULE, WEIGHTS, CompileOptions(BATCH, fusion=level, taps=taps))
    program = backend.compile(SCHEDULE, WEIGHTS, options(fusion=level, taps=taps))
    given = preprocessed(pixels)
    expected, got = plain(given), program(pixels)
    np.testing.assert_allclose(program.fetch("image"), given, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(program.fetch("pixels"), pixels)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(program(np.ascontiguousarray(pixels)), got)
    steps = [time.step for time in program.profile()]
    assert steps[0] == "normalize"
    assert (
        steps[1:] == [time.step for time in plain.profile() if "image@" not in time.step]
        or name == "numba-cpu"
    )


def test_the_plan_begins_with_bytes_and_else_is_what_it_was() -> None:
    backend = r18_numpy.Backend()
    plain = make_plan(backend, SCHEDULE, CompileOptions(BATCH))
    plan = make_plan(backend, SCHEDULE, options())
    pixels = plan.tensors["pixels"]
    assert (pixels.dtype, pixels.layout) == (np.dtype(np.uint8), Layout.NHWC)
    assert pixels.nbytes == BATCH * 3 * 32 * 32
    assert plan.tensors["image"].nbytes == 4 * pixels.nbytes == plain.tensors["image"].nbytes
    assert plan.steps[0].name == "normalize"
    assert plan.steps[0].problem.op == PIXELS
    assert [(s.name, s.kernel) for s in plan.steps[1:]] == [(s.name, s.kernel) for s in plain.steps]
    assert {c.name for c in plan.schedule.checkpoints} == {
        c.name for c in plain.schedule.checkpoints
    }
    assert not plain.schedule.of_pixels
    assert plan.schedule.of_pixels


def test_what_is_no_pixels_is_refused() -> None:
    program = r18_numpy.Backend().compile(SCHEDULE, WEIGHTS, options())
    for dtype in (np.float32, np.int8, np.int64, bool):
        with pytest.raises(UsageError) as wrong:
            program.load(np.zeros((BATCH, 3, 32, 32), dtype))
        assert str(wrong.value) == (
            f"the program takes uint8 pixels and normalises them itself, got {np.dtype(dtype)}; "
            "for preprocessed input compile without `pixels`"
        )
    with pytest.raises(ShapeError, match=r"takes \(3, 3, 32, 32\), got \(3, 32, 32, 3\)"):
        program.load(np.zeros((BATCH, 32, 32, 3), np.uint8))
    plain = r18_numpy.Backend().compile(SCHEDULE, WEIGHTS, CompileOptions(BATCH))
    with pytest.raises(UsageError, match="got uint8; for pixels compile with `pixels`"):
        plain.load(np.zeros((BATCH, 3, 32, 32), np.uint8))


class WithoutIt(r18_numpy.Backend):
    def kernels(self):  # type: ignore[no-untyped-def]
        return tuple(kernel for kernel in super().kernels() if kernel.op is not Normalize)


def test_a_backend_need_not_have_a_kernel_for_it() -> None:
    backend = WithoutIt()
    assert backend.compile(SCHEDULE, WEIGHTS, CompileOptions(BATCH)) is not None
    with pytest.raises(NoKernel) as missing:
        make_plan(backend, SCHEDULE, options())
    assert str(missing.value).splitlines()[1:] == [
        "  precisions with kernels for normalize: none",
        "  preprocess on the host instead, and compile without `pixels`",
    ]


def test_its_kernel_is_overridden_like_any() -> None:
    known = {"normalize": "numpy/normalize/scale_shift/fp32"}
    plan = make_plan(r18_numpy.Backend(), SCHEDULE, options(kernels=known))
    assert plan.kernel_ids()["normalize"] == known["normalize"]
    with pytest.raises(UsageError, match="unknown step or op in a kernel override 'normalize'"):
        make_plan(r18_numpy.Backend(), SCHEDULE, CompileOptions(BATCH, kernels=known))


# -- the pass ----------------------------------------------------------------------------------


def test_the_pass_puts_one_step_in_front_at_every_level() -> None:
    for level in FUSION_LEVELS:
        schedule = fuse(SCHEDULE, level)
        put = from_pixels(schedule, PIXELS)
        assert put.steps == (Step("normalize", PIXELS, ("pixels",), "image"), *schedule.steps)
        assert (put.input, put.output, put.level) == ("pixels", "fc", level)
        assert put.checkpoints == schedule.checkpoints
        assert put.weight_specs == schedule.weight_specs
        assert put.between("image", "logits").steps == schedule.steps
        assert put == schedule_for(r18_numpy.Backend(), SCHEDULE, options(fusion=level))
    with pytest.raises(ScheduleError, match="'normalize' appears twice"):
        from_pixels(from_pixels(SCHEDULE, PIXELS), PIXELS)
    with pytest.raises(ShapeError, match="step 'normalize': normalize: expected 1 channels"):
        from_pixels(SCHEDULE, Normalize((0.5,), (0.5,)))


def test_pixels_are_read_by_that_step_alone() -> None:
    normalize = Step("normalize", PIXELS, ("pixels",), "image")
    message = "pixels are the schedule's input, and what reads them is normalize alone"
    for steps in (
        (normalize, Step("relu", ReLU(), ("pixels",), "relu")),
        (Step("relu", ReLU(), ("pixels",), "relu"), replace(normalize, inputs=("relu",))),
        (normalize, Step("again", PIXELS, ("image",), "again")),
    ):
        with pytest.raises(ScheduleError, match=message):
            Schedule("wrong", (3, 4, 4), steps, (), input="pixels")


# -- the op ------------------------------------------------------------------------------------


def test_scale_and_shift_are_the_op() -> None:
    scale, shift = (np.array(values) for values in PIXELS.scale_shift)
    shades = np.arange(256)[:, None]
    expected = (shades / 255 - IMAGENET.mean) / IMAGENET.std
    np.testing.assert_allclose(shades * scale + shift, expected, rtol=0, atol=1e-14)


def test_every_precision_of_the_gpu_has_a_kernel_that_takes_the_networks_images() -> None:
    taken = {k.precision.name for k in cupy_kernels() if k.op is Normalize}
    assert taken == {"fp32", "tf32", "fp16x3", "fp16", "bf16"}


def with_fault(name: str) -> Backend:
    """NumPy's kernels with one wrong kernel for `Normalize`."""
    kernels = [k for k in r18_numpy.Backend().kernels() if k.op is not Normalize]
    wrong = (f.kernel for f in FAULTS if f.kernel.id == f"fault/normalize/{name}/fp32")
    return HostBackend([*kernels, *wrong])


def test_a_wrong_kernel_of_it_shows_in_the_logits() -> None:
    """A wrong `Normalize` changes the logits, so the program uses the kernel of its plan."""
    pixels = bytes_of(SCHEDULE, BATCH)
    right = r18_numpy.Backend().compile(SCHEDULE, WEIGHTS, options())
    swapped = with_fault("bgr").compile(SCHEDULE, WEIGHTS, options())
    assert np.abs(swapped(pixels) - right(pixels)).max() > 1e-2


# -- against float64 ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "level"),
    [
        ("numpy", "fp32", "none"),
        ("numpy", "fp64", "all"),
        ("torch", "bf16", "all"),
        ("numba-cpu", "fp32", "all"),
    ],
)
def test_every_checkpoint_from_the_same_bytes(name: str, precision: str, level: str) -> None:
    """Checkpoints are right from pixels on; float64 starts there too, so the first step counts."""
    weights = load_weights("synthetic", SCHEDULE)
    report = compare_checkpoints(
        get_backend(name),
        SCHEDULE,
        weights,
        seeded_pixels(SCHEDULE, 2, PIXELS),
        precision=precision,
        fusion=level,
        taps="all",
        pixels=PIXELS,
    )
    assert report.findings == ()
    assert report.checkpoints[0].name == "image"
    assert report.checkpoints[0].steps == ("normalize",)
    assert report.steps[0].step == "normalize"
    assert 0 < report.steps[0].ratio <= 1
    assert report.top1 is not None


def test_a_wrong_first_step_is_found_in_the_network() -> None:
    report = compare_checkpoints(
        with_fault("bgr"),
        SCHEDULE,
        load_weights("synthetic", SCHEDULE),
        seeded_pixels(SCHEDULE, 2, PIXELS),
        pixels=PIXELS,
    )
    assert [finding.kernel for finding in report.findings] == ["fault/normalize/bgr/fp32"]
    assert not report.ok
