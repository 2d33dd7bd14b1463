"""The registry: names, `R18_BACKEND`, `module:attr`, `auto`, and plugins that are broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

import r18_numpy
from r18.backend import Backend as BackendBase
from r18.backend import CompileOptions, DeviceInfo, Kernel, registry
from r18.backend.host import HostMemory, HostStream
from r18.backend.registry import (
    AUTO_ORDER,
    available,
    get_backend,
    installed,
    load_backend,
    survey,
    title,
)
from r18.errors import BackendUnavailable, R18Error, UnknownName, UsageError
from r18.graph.resnet import tiny
from support import images, output_of, random_weights, run_python

THIRD_PARTY = Path(__file__).parents[1] / "third_party"


# -- in this process: entry points made up for the test ----------------------------------------


class Working(BackendBase):
    """A backend without kernels that probes; subclasses fail in one way each."""

    name = "working"

    def __init__(self) -> None:
        self.memory = HostMemory()

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", f"the device of {self.name}")

    def kernels(self) -> tuple[Kernel, ...]:
        return ()

    def stream(self) -> HostStream:
        return HostStream()


class NoDevice(Working):
    """A backend that says why it cannot run here."""

    name = "nodevice"

    def probe(self) -> DeviceInfo:
        raise BackendUnavailable("nodevice", "no device was found", "Plug one in.")


class Simulated(Working):
    """A backend that has no hardware."""

    name = "simulated"

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cuda", "a simulator", simulated=True)


class FaultyProbe(Working):
    """A backend whose probe raises what it should not."""

    name = "faulty"

    def probe(self) -> DeviceInfo:
        raise OSError("driver version mismatch")


class FaultyInit(Working):
    """A backend that cannot be made."""

    def __init__(self) -> None:
        raise ValueError("bad configuration")


class UsageInit(Working):
    """A backend that cannot be made, and says so with one of r18's own errors."""

    def __init__(self) -> None:
        raise UsageError("EXAMPLE_DEVICE is set to 'nonsense'")


INIT_LINE = FaultyInit.__init__.__code__.co_firstlineno + 1


class NoStream:
    """An object that lacks most of the protocol of a backend."""

    name = "incomplete"
    memory = None

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cpu", "never reached")


ready = Working()  # an instance serves as well as a factory


class Shelf:
    """A class that shows that attributes may be nested: `module:Shelf.Inner`."""

    Inner = Working


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Entry points that the registry finds: name → `attribute here` or `module:attr`."""
    module = types.ModuleType("made_up_plugins")
    for name in (
        "Working",
        "NoDevice",
        "Simulated",
        "FaultyProbe",
        "FaultyInit",
        "UsageInit",
        "NoStream",
        "ready",
        "Shelf",
    ):
        setattr(module, name, globals()[name])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    found: dict[str, str] = {}

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "r18.backends"
        values = {n: v if ":" in v else f"made_up_plugins:{v}" for n, v in found.items()}
        return [EntryPoint(name, value, group) for name, value in values.items()]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return found


def test_our_backends_are_installed() -> None:
    assert {"numpy", "torch"} <= installed().keys()
    assert load_backend("numpy").name == "numpy"


def test_an_unknown_name_comes_with_the_nearest_and_the_known_ones(
    points: dict[str, str],
) -> None:
    points.update(numpy="Working", torch="Working")
    for ask in (load_backend, get_backend):
        with pytest.raises(UnknownName) as caught:
            ask("nunpy")
        assert str(caught.value) == (
            "unknown backend 'nunpy', did you mean 'numpy'?\n"
            "  known: auto, numpy, torch\n"
            "  Set R18_BACKEND or --backend to one of these, to 'auto', or to 'module:attr'."
        )
    points["Example"] = "Working"
    with pytest.raises(UnknownName, match="did you mean 'Example'"):  # spelled as it is known
        get_backend("exampel")
    with pytest.raises(UnknownName) as caught:
        get_backend("zzz")
    assert str(caught.value).splitlines()[0] == "unknown backend 'zzz'"


def test_listing_is_in_the_order_of_auto_then_by_name(points: dict[str, str]) -> None:
    points.update(zeta="Working", numpy="Working", alpha="Working", cupy="Working", torch="Working")
    assert list(installed()) == ["cupy", "numpy", "torch", "alpha", "zeta"]
    assert AUTO_ORDER == ("cupy", "numba", "numba-cpu", "numpy", "torch")


def test_auto_takes_the_first_that_probes_and_it_says_which(points: dict[str, str]) -> None:
    points.update(zeta="Working", cupy="NoDevice", numba="FaultyInit", numpy="ready")
    assert get_backend() is ready  # before zeta, though made last
    assert get_backend("auto").probe().name == "the device of working"
    points["cupy"] = "Working"
    chosen = get_backend()
    assert chosen is not ready
    assert chosen.name == "working"


def test_auto_never_takes_a_simulator(points: dict[str, str]) -> None:
    points.update(numba="Simulated", numpy="Working")
    assert get_backend().name == "working"
    assert get_backend("numba").name == "simulated"
    points["numpy"] = "NoDevice"
    with pytest.raises(BackendUnavailable, match="numba: has a simulator alone, which auto never"):
        get_backend()


def test_auto_does_not_probe_what_says_that_it_simulates(
    points: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points.update(cupy="FaultyInit", numba="Simulated", numpy="Working")
    monkeypatch.setattr(Simulated, "simulates", lambda self: True)
    monkeypatch.setattr(Simulated, "probe", lambda self: pytest.fail("probed"))
    assert get_backend().name == "working"
    points["numpy"] = "NoDevice"
    with pytest.raises(BackendUnavailable, match="numba: has a simulator alone, which auto never"):
        get_backend()

    def faulty(self: Simulated) -> bool:
        raise OSError("driver version mismatch")

    monkeypatch.setattr(Simulated, "simulates", faulty)
    cause = r"numba: simulates\(\) raised OSError: driver version mismatch"
    with pytest.raises(BackendUnavailable, match=cause):
        get_backend()


def test_auto_takes_a_third_partys_backend_when_ours_cannot_run(points: dict[str, str]) -> None:
    points.update(numpy="NoDevice", somebodys="Working")
    assert get_backend().name == "working"


@pytest.mark.parametrize("broken", ["FaultyInit", "UsageInit", "FaultyProbe", "NoStream"])
def test_auto_passes_over_a_plugin_that_is_broken_in_any_way(
    points: dict[str, str], broken: str
) -> None:
    """`auto` skips a broken plugin, whatever is wrong with it, and picks the next backend."""
    points.update(cupy=broken, numpy="Working")
    assert get_backend().name == "working"


def test_auto_with_nothing_that_runs_lists_every_cause(points: dict[str, str]) -> None:
    points.update(numpy="NoDevice", other="FaultyInit")
    with pytest.raises(BackendUnavailable) as caught:
        get_backend()
    assert str(caught.value) == (
        "backend 'auto' is not available: no installed backend can run here: "
        "numpy: no device was found; other: FaultyInit() raised ValueError: bad configuration\n"
        "  `r18 backends` shows what each one needs."
    )
    points.clear()
    with pytest.raises(BackendUnavailable, match="none is installed"):
        get_backend()


def test_the_variable_chooses_and_an_argument_wins(
    points: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points.update(numpy="ready", other="Working")
    monkeypatch.setenv("R18_BACKEND", "other")
    assert get_backend() is not ready
    assert get_backend("numpy") is ready
    monkeypatch.setenv("R18_BACKEND", "auto")
    assert get_backend() is ready
    monkeypatch.setenv("R18_BACKEND", "")  # set to nothing is not set
    assert get_backend() is ready


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("NoDevice", "backend 'nodevice' is not available: no device was found\n  Plug one in."),
        (
            "FaultyInit",
            "backend 'chosen' is not available: FaultyInit() raised ValueError: bad configuration\n"
            f"  This is a fault of that plugin, in __init__ (test_registry.py:{INIT_LINE}).",
        ),
        (
            "absent_module_of_nobody:Backend",
            "backend 'chosen' is not available: ModuleNotFoundError: "
            "No module named 'absent_module_of_nobody'\n"
            "  Install the package that provides absent_module_of_nobody, or the extra that brings "
            "it.",
        ),
    ],
)
def test_an_explicit_choice_never_falls_back(
    points: dict[str, str], monkeypatch: pytest.MonkeyPatch, plugin: str, message: str
) -> None:
    points.update(chosen=plugin, numpy="Working")
    with pytest.raises(BackendUnavailable) as caught:
        get_backend("chosen")
    assert str(caught.value) == message
    monkeypatch.setenv("R18_BACKEND", "chosen")
    with pytest.raises(BackendUnavailable):
        get_backend()


def test_a_plugins_own_errors_keep_their_cause(points: dict[str, str]) -> None:
    points.update(chosen="FaultyInit")
    with pytest.raises(BackendUnavailable) as caught:
        load_backend("chosen")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_backend_that_lacks_something_is_told_what(points: dict[str, str]) -> None:
    points.update(chosen="NoStream")
    with pytest.raises(BackendUnavailable) as caught:
        load_backend("chosen")
    assert caught.value.cause == "class NoStream does not inherit r18.backend.Backend"
    assert caught.value.remedy == "Write class NoStream(r18.backend.Backend)."


def test_two_plugins_of_one_name_do_not_hide_each_other(
    points: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two plugins named `numpy` are an error that names both, so that neither hides the other."""
    values = ["made_up_plugins:Working", "made_up_plugins:FaultyInit"]

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [EntryPoint("numpy", value, group) for value in values]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    with pytest.raises(R18Error) as caught:
        get_backend("numpy")
    assert all(value in str(caught.value) for value in values)


def test_loading_does_not_probe(points: dict[str, str]) -> None:
    points.update(chosen="FaultyProbe")
    assert load_backend("chosen").name == "faulty"


def test_the_survey_lists_the_broken_ones_with_their_cause(points: dict[str, str]) -> None:
    points.update(
        numpy="Working", a="FaultyInit", b="FaultyProbe", c="NoDevice", d="nobody_has_this:x"
    )
    lines = {line.name: line for line in survey()}
    assert list(lines) == ["numpy", "a", "b", "c", "d"]
    assert lines["numpy"].device == DeviceInfo("cpu", "the device of working")
    assert {name for name, line in lines.items() if line.device is None} == set("abcd")
    assert lines["a"].cause == "FaultyInit() raised ValueError: bad configuration"
    assert lines["b"].cause == "probe() raised OSError: driver version mismatch"
    assert (lines["c"].cause, lines["c"].remedy) == ("no device was found", "Plug one in.")
    assert "No module named 'nobody_has_this'" in lines["d"].cause
    assert all(line.remedy for line in lines.values() if line.device is None)
    assert [backend.name for backend in available()] == ["working"]


# -- module:attr -------------------------------------------------------------------------------


def test_module_and_attribute_name_a_backend_that_is_not_installed(
    points: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get_backend("made_up_plugins:Working").name == "working"
    assert get_backend("made_up_plugins:Shelf.Inner").name == "working"
    assert get_backend("made_up_plugins:ready") is ready
    monkeypatch.setenv("R18_BACKEND", "made_up_plugins:Working")
    assert get_backend().name == "working"


@pytest.mark.parametrize("path", ["made_up_plugins:", ":Working", ":"])
def test_what_is_not_module_and_attribute(points: dict[str, str], path: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_backend(path)
    assert str(caught.value) == f"'{path}' is not of the form module:attr"


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("made_up_plugins:Wurking", "made_up_plugins has no 'Wurking', did you mean 'Working'?"),
        ("made_up_plugins:Working.sub", "Working has no 'sub'"),
        ("nobody_has_this_module:x", "no module 'nobody_has_this_module' in the current folder"),
        ("math:pi", "3.141592653589793 is no backend"),
        ("made_up_plugins:NoStream", "class NoStream does not inherit r18.backend.Backend"),
    ],
)
def test_a_module_and_attribute_that_is_no_backend(
    points: dict[str, str], path: str, cause: str
) -> None:
    points.update(numpy="Working")  # which is not fallen back to
    with pytest.raises(BackendUnavailable) as caught:
        get_backend(path)
    assert caught.value.name == path
    assert cause in caught.value.cause


def test_every_error_of_the_registry_is_in_the_tree() -> None:
    for ask in ("nonsense", "a:", "nobody_has_this_module:x"):
        with pytest.raises(R18Error):
            get_backend(ask)


# -- distributions of other people -------------------------------------------------------------


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders for the path, each with a distribution built from tests/third_party.

    setuptools' build backend makes the wheel, as pip would have it do; a wheel of pure Python is
    installed by unpacking it. Needs no network.
    """
    found = {}
    for source in sorted(p for p in THIRD_PARTY.iterdir() if (p / "pyproject.toml").is_file()):
        folder = tmp_path_factory.mktemp(source.name)
        copy, wheels = folder / "source", folder / "wheels"  # building writes next to the source
        shutil.copytree(source, copy)
        wheels.mkdir()
        code = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = wheels.glob("*.whl")
        found[source.name] = folder / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(found[source.name])
    return found


def test_a_third_partys_distribution_is_found_by_its_dist_info(sites: dict[str, Path]) -> None:
    code = """
from r18.backend.registry import installed
point = installed()["example"]
print(point.value, point.dist.name, point.dist.version)
"""
    found = output_of(code, path=[sites["r18_example"]])
    assert found == "r18_example:Backend r18-example 1.2.3"
    assert "example" not in installed()  # but here, where it is not on the path


RUN = """
import numpy as np
from r18.backend import CompileOptions
from r18.backend.registry import get_backend
from r18.graph.resnet import tiny

given = np.load({given!r})
weights = {{name: given[name] for name in given.files if name != "images"}}
backend = get_backend()
outputs = {{}}
for level in ("none", "all"):
    program = backend.compile(
        tiny(softmax=True), weights, CompileOptions(batch=3, fusion=level, taps=("logits",))
    )
    outputs[level + ".softmax"] = program(given["images"])
    outputs[level + ".logits"] = program.fetch("logits")
np.savez({out!r}, **outputs)
print(backend.name, sorted({{k.split("/")[0] for k in program.plan.kernel_ids().values()}}))
"""


def test_a_third_partys_backend_computes_the_network(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    """`R18_BACKEND=example` computes the network in a process that knows only its dist-info."""
    schedule = tiny(softmax=True)
    weights, x = random_weights(schedule), images(schedule, 3)
    given, out = str(tmp_path / "given.npz"), str(tmp_path / "out.npz")
    np.savez(given, images=x, **weights)
    code = RUN.format(given=given, out=out)
    printed = output_of(code, path=[sites["r18_example"]], env={"R18_BACKEND": "example"})
    assert printed == "example ['example']"
    got = np.load(out)
    for level in ("none", "all"):
        options = CompileOptions(batch=3, fusion=level, taps=("logits",))
        program = r18_numpy.Backend().compile(schedule, weights, options)
        np.testing.assert_allclose(got[f"{level}.softmax"], program(x), rtol=0, atol=1e-5)
        expected = program.fetch("logits")
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(got[f"{level}.logits"], expected, rtol=0, atol=atol)


def test_the_name_of_a_third_partys_backend_is_known_only_where_it_is_installed(
    sites: dict[str, Path],
) -> None:
    code = "from r18.backend.registry import get_backend; get_backend()"
    done = run_python(code, env={"R18_BACKEND": "example"})
    assert done.returncode != 0
    assert "UnknownName: unknown backend 'example'" in done.stderr
    done = run_python(code, path=[sites["r18_example"]], env={"R18_BACKEND": "exmaple"})
    assert done.returncode != 0
    assert "unknown backend 'exmaple', did you mean 'example'?" in done.stderr


def test_a_distribution_whose_import_raises_is_listed_and_hides_nothing(
    sites: dict[str, Path],
) -> None:
    path = [sites["r18_broken"], sites["r18_example"]]
    code = """
import json
from r18.backend.registry import get_backend, survey
lines = {x.name: [x.provider, x.device and x.device.name, x.cause] for x in survey()}
print(json.dumps([get_backend().name, lines]))
"""
    auto, listed = json.loads(output_of(code, path=path))
    assert auto in AUTO_ORDER
    cause = "RuntimeError: libexample.so.3: cannot open shared object file, in r18_broken.py:3"
    assert listed["broken"] == ["r18-broken 0.0.1", None, cause]
    assert listed["example"] == ["r18-example 1.2.3", "an example of a CPU", ""]
    assert listed["numpy"][0].startswith("r18 ")
    assert listed["numpy"][1]
    assert listed["torch"][1]


def test_a_broken_distribution_that_is_chosen_is_an_error(sites: dict[str, Path]) -> None:
    code = "from r18.backend.registry import get_backend; print(get_backend().name)"
    done = run_python(code, path=[sites["r18_broken"]], env={"R18_BACKEND": "broken"})
    assert done.returncode != 0
    assert "backend 'broken' is not available: RuntimeError: libexample.so.3" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import nobody_has_this\n", "ModuleNotFoundError: No module named 'nobody_has_this'"),
        ("Other = 1\n", "AttributeError"),
        ("def Backend():\n    return None\n", "Backend() returned None, no backend"),
        ("import sys\nsys.exit('needs a licence')\n", "SystemExit: needs a licence"),
    ],
    ids=["syntax", "module", "attribute", "none", "exit"],
)
def test_whatever_a_plugin_does_the_others_are_listed(
    points: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    body: str,
    cause: str,
) -> None:
    module = f"plugin_{request.node.callspec.id}"
    (tmp_path / f"{module}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    points.update(cupy=f"{module}:Backend", numpy="Working")
    lines = {line.name: line for line in survey()}
    assert cause in lines["cupy"].cause
    assert lines["numpy"].device is not None


def test_listing_loads_nothing(sites: dict[str, Path]) -> None:
    """Listing imports neither plugins nor their libraries, so a broken plugin is listed too."""
    code = """
import sys
from r18.backend.registry import installed
names = list(installed())
plugins = {point.module for point in installed().values()}
loaded = plugins | {name.split(".")[0] for name in plugins} | {"torch", "numba", "cupy"}
print(names, sorted(loaded & sys.modules.keys()))
"""
    names, loaded = output_of(code, path=list(sites.values())).split("] ")
    assert loaded == "[]"
    assert all(name in names for name in ("numpy", "torch", "example", "broken"))


def test_choosing_one_backend_loads_no_other() -> None:
    code = """
import sys
from r18.backend.registry import get_backend
get_backend("numpy")
print([name for name in ("torch", "r18_torch", "numba", "cupy") if name in sys.modules])
"""
    assert output_of(code) == "[]"


class Borrowed(r18_numpy.Backend):
    """A backend that keeps the name of the backend it inherits from."""


class Named(r18_numpy.Backend):
    name = "mine"


def test_a_backend_of_an_installed_one_s_name_is_told_apart() -> None:
    assert title(r18_numpy.Backend()) == "numpy"
    assert title(Named()) == "mine"
    assert title(Borrowed()) == f"numpy (of {__name__}.Borrowed, not the installed one)"
