"""The digest of a kernel's sources: changes that count, changes that do not, and refusals."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from r18.backend import digest
from r18.backend.digest import DigestError, PythonSources, cuda_digest, cuda_files, cuda_tokens
from support import ROOT

MODULES = {
    "__init__.py": "",
    "conv/__init__.py": "",
    "conv/direct.py": '''
        """A convolution."""
        from pkg.shared import tile

        class Direct:
            """A kernel."""
            def launch(self):
                from pkg.device import direct
                return direct.run(tile.SIZE)

        class Other:
            def launch(self):
                from pkg.device import other
                return other.run()
    ''',
    "shared/__init__.py": "",
    "shared/tile.py": "from .sizes import base\nSIZE = base(4)\n",
    "shared/sizes.py": """
        from pkg import serving

        def base(n):
            # as large as fits
            return 8 * n
    """,
    "device/__init__.py": "",
    "device/direct.py": "import math\n\ndef run(n):\n    return math.sqrt(n)\n",
    "device/other.py": "def run():\n    return 0\n",
    "serving.py": "PORT = 1\n",
}


class Package:
    """A package of kernels on disk; every digest reads it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pkg"
        for name, text in MODULES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()) + "\n")

    def edit(self, name: str, before: str, after: str) -> None:
        text = (self.folder / name).read_text()
        assert before in text
        (self.folder / name).write_text(text.replace(before, after))

    def digest(self, module: str = "pkg.conv.direct", python: str = sys.executable) -> str:
        # The module by its file: another Python need not have what `r18.backend` depends on.
        code = f"""
import importlib, importlib.util, sys
from pathlib import Path
sys.path[:0] = [{str(self.folder.parent)!r}, {str(ROOT)!r}]
spec = importlib.util.spec_from_file_location("digest", {digest.__file__!r})
module = sys.modules["digest"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
PythonSources = module.PythonSources
kind = importlib.import_module({module!r}).Direct
print(PythonSources(Path({str(self.folder)!r}), frozenset({{"serving.py"}})).digest(kind))
"""
        return said(python, code)

    def digests(self, *asked: tuple[str, tuple[str, ...]]) -> list[str]:
        """Digests of classes of `pkg.conv.direct` with this infrastructure, all in one process."""
        code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(self.folder.parent)!r})
from pkg.conv import direct
from r18.backend.digest import PythonSources
for name, serving in {asked!r}:
    sources = PythonSources(Path({str(self.folder)!r}), frozenset(serving))
    print(sources.digest(getattr(direct, name)))
"""
        return said(sys.executable, code).split()


def said(python: str, code: str) -> str:
    done = subprocess.run([python, "-B", "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


CHANGES: list[tuple[str, str, str]] = [
    ("conv/direct.py", "tile.SIZE", "tile.SIZE + 1"),
    ("shared/tile.py", "base(4)", "base(5)"),
    ("shared/sizes.py", "8 * n", "8 + n"),  # two imports away
    ("device/direct.py", "sqrt(n)", "cbrt(n)"),
    ("device/direct.py", "import math", "import cmath as math"),
]
NO_CHANGES: list[tuple[str, str, str]] = [
    ("conv/direct.py", '"""A convolution."""', '"""A convolution, and how."""'),
    ("conv/direct.py", '    """A kernel."""\n', ""),
    ("shared/sizes.py", "# as large as fits", "# said otherwise"),
    ("shared/sizes.py", "return 8 * n", "return (\n        8 * n\n    )"),
    ("serving.py", "PORT = 1", "PORT = 2"),
    ("device/other.py", "return 0", "return 1"),  # another class of the module launches it
]


@pytest.mark.parametrize(("name", "before", "after"), CHANGES)
def test_code_counts(package: Package, name: str, before: str, after: str) -> None:
    unchanged = package.digest()
    package.edit(name, before, after)
    assert package.digest() != unchanged


@pytest.mark.parametrize(("name", "before", "after"), NO_CHANGES)
def test_what_decides_no_result_does_not_count(
    package: Package, name: str, before: str, after: str
) -> None:
    unchanged = package.digest()
    package.edit(name, before, after)
    assert package.digest() == unchanged


def test_the_module_of_every_base_class_counts(package: Package) -> None:
    package.write("shared/kernel.py", "class Kernel:\n    SIZE = 1\n")
    package.edit("conv/direct.py", "class Direct:", "class Direct(Kernel):")
    package.edit(
        "conv/direct.py", "import tile\n", "import tile\nfrom pkg.shared.kernel import Kernel\n"
    )
    unchanged = package.digest()
    package.edit("shared/kernel.py", "SIZE = 1", "SIZE = 2")
    assert package.digest() != unchanged


def test_modules_that_move_keep_the_digest(package: Package) -> None:
    unchanged = package.digest()
    shutil.move(package.folder / "conv", package.folder / "convolution")
    shutil.move(package.folder / "shared/sizes.py", package.folder / "lengths.py")
    package.edit("shared/tile.py", "from .sizes import", "from pkg.lengths import")
    assert package.digest("pkg.convolution.direct") == unchanged


def test_an_import_that_brings_other_code_counts(package: Package) -> None:
    """An import that brings other code changes the digest, even if it was already a source."""
    package.write("device/direct.py", "from pkg.device.other import run as helper\nrun = helper\n")
    package.write(
        "shared/sizes.py", "from pkg.device.direct import run\n\ndef base(n):\n    return n\n"
    )
    unchanged = package.digest()
    package.edit("shared/sizes.py", "pkg.device.direct", "pkg.device.other")
    assert package.digest() != unchanged


SEVERAL = {
    "from pkg.device import direct, other": ("device/direct.py", "device/other.py"),
    "import pkg.device.direct as direct, pkg.device.other": ("device/direct.py", "device/other.py"),
    "from pkg.device.direct import run, math": ("device/direct.py",),
}


@pytest.mark.parametrize("several", SEVERAL)
def test_every_name_of_one_import_counts(package: Package, several: str) -> None:
    package.write("shared/sizes.py", f"{several}\n\ndef base(n):\n    return n\n")
    unchanged = package.digest()
    for name in SEVERAL[several]:
        package.edit(name, "run", "walk" if "other" in name else "run")
        package.edit(name, "return", "return 1 +")
        assert package.digest() != unchanged
        unchanged = package.digest()
    *before, last = several.rpartition(", ")
    package.edit("shared/sizes.py", several, "".join(before) + last + " as renamed")
    assert package.digest() != unchanged


@pytest.mark.parametrize(
    "form", ["from pkg.conv.direct import Direct, gone", "import math, pkg.gone"]
)
def test_every_name_of_one_import_must_be_there(
    package: Package, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    with loaded(package, monkeypatch) as kind:
        package.edit("shared/sizes.py", "from pkg import serving", form)
        with pytest.raises(DigestError, match="gone"):
            PythonSources(package.folder).digest(kind)


def test_other_classes_of_a_base_class_s_module_do_not_count(package: Package) -> None:
    package.write(
        "shared/kernel.py",
        """
        class Kernel:
            SIZE = 1

        class Unused:
            def launch(self):
                from pkg.device import other
                return other.run()
        """,
    )
    package.edit("conv/direct.py", "class Direct:", "class Direct(Kernel):")
    package.edit(
        "conv/direct.py", "import tile\n", "import tile\nfrom pkg.shared.kernel import Kernel\n"
    )
    unchanged = package.digest()
    package.edit("device/other.py", "return 0", "return 1")
    assert package.digest() == unchanged


def test_a_digest_does_not_depend_on_those_before_it(package: Package) -> None:
    """A digest is the same whichever digests the process computed before it."""
    asked = [
        (name, serving)
        for name in ("Direct", "Other")
        for serving in (("serving.py",), (), ("shared/tile.py",))
    ]
    alone = [package.digests(one)[0] for one in asked]
    assert len(set(alone)) == len(asked)
    assert package.digests(*asked) == alone
    assert package.digests(*reversed(asked)) == alone[::-1]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_gives_the_same_digest(package: Package, version: str) -> None:
    """Every Python version gives the same digest, since one version reads another's records."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"there is no Python {version} on this machine")
    package.write(
        "shared/sizes.py",
        "def base(n, *more, flag=None, **rest):\n    a = f'{n!r:>{4}} ' 'b' f'{flag}'\n"
        "    if a: return 8 * n if ... else {**rest}\n    return [x for x in more if x] or None\n",
    )
    assert package.digest(python=python) == package.digest()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("from pkg.shared import tile", "from pkg.shared.gone import tile", "'pkg.shared.gone'"),
        ("from pkg.shared import tile", "from pkg.shared import gone as tile", "imports 'gone'"),
        ("from pkg.device import direct", "import pkg.device.gone", "'pkg.device.gone'"),
    ],
)
def test_a_missing_name_is_an_error(
    package: Package, monkeypatch: pytest.MonkeyPatch, before: str, after: str, message: str
) -> None:
    """A name missing from the source is an error, even if the loaded module still has it."""
    with loaded(package, monkeypatch) as kind:
        package.edit("conv/direct.py", before, after)
        with pytest.raises(DigestError, match=message):
            PythonSources(package.folder).digest(kind)


def test_a_missing_infrastructure_module_is_an_error(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(package, monkeypatch) as kind:
        for serving in ({"gone.py"}, {"serving.py", "conv/gone.py"}, {"conv/direct.py", "gone.py"}):
            with pytest.raises(DigestError, match=r"gone\.py"):
                PythonSources(package.folder, frozenset(serving)).digest(kind)


def test_a_class_of_another_package_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(DigestError, match="is not in"):
        PythonSources(tmp_path / "pkg").digest(Package)


class loaded:
    """The kernel class of a package, imported in this process and forgotten afterwards."""

    def __init__(self, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(package.folder.parent)

    def __enter__(self) -> type:
        kind: type = importlib.import_module("pkg.conv.direct").Direct
        return kind

    def __exit__(self, *error: object) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "pkg"]:
            del sys.modules[name]


# -- CUDA C++ ----------------------------------------------------------------------------------

SOURCES = {
    "conv/direct.cu": '// A kernel.\n#include "common/tile.cuh"\n\n__global__ void f() { g(); }\n',
    "common/tile.cuh": (
        '#pragma once\n#include "sizes.cuh"\n__device__ void g() { asm("a // b"); }\n'
    ),
    "common/sizes.cuh": "#pragma once\n#define SIZE 4 /* floats */\n",
}


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[..., str]:
    """The digest of `conv/direct.cu`, after an edit of a file where one is given."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def digest(name: str = "", before: str = "", after: str = "") -> str:
        if name:
            text = (tmp_path / name).read_text()
            assert before in text
            (tmp_path / name).write_text(text.replace(before, after))
        return cuda_digest(tmp_path / "conv/direct.cu", tmp_path)

    return digest


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("conv/direct.cu", "g();", "g(), g();"),
        ("common/tile.cuh", "a // b", "a // c"),
        ("common/sizes.cuh", "SIZE 4", "SIZE 8"),
    ],
)
def test_device_code_counts(
    kernels: Callable[..., str], name: str, before: str, after: str
) -> None:
    assert kernels() != kernels(name, before, after)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("conv/direct.cu", "// A kernel.", "/* Said\n otherwise. */"),
        ("common/sizes.cuh", "/* floats */", ""),
        ("common/tile.cuh", "void g() {", "void   g()  {"),
    ],
)
def test_comments_of_device_code_do_not_count(
    kernels: Callable[..., str], name: str, before: str, after: str
) -> None:
    assert kernels() == kernels(name, before, after)


def test_every_header_of_a_file_counts(tmp_path: Path) -> None:
    (tmp_path / "one.cuh").write_text("int one;\n")
    (tmp_path / "two.cuh").write_text("int two;\n")
    path = tmp_path / "both.cu"
    path.write_text('#include "one.cuh"\n#include "two.cuh"\n')
    seen = {cuda_digest(path, tmp_path)}
    for name in ("one.cuh", "two.cuh"):
        (tmp_path / name).write_text("int other;\n")
        seen.add(cuda_digest(path, tmp_path))
    assert len(seen) == 3


def test_headers_that_move_keep_the_digest(kernels: Callable[..., str], tmp_path: Path) -> None:
    unchanged = kernels()
    shutil.move(tmp_path / "common/sizes.cuh", tmp_path / "lengths.cuh")
    assert kernels("common/tile.cuh", '"sizes.cuh"', '"lengths.cuh"') == unchanged


def test_a_missing_header_is_an_error(kernels: Callable[..., str]) -> None:
    with pytest.raises(DigestError, match=r'includes "gone\.cuh"'):
        kernels("common/tile.cuh", '"sizes.cuh"', '"gone.cuh"')


def test_every_header_is_listed_once(kernels: Callable[..., str], tmp_path: Path) -> None:
    found = cuda_files(tmp_path / "conv/direct.cu", tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == sorted(SOURCES)


def test_directives_keep_their_lines() -> None:
    assert cuda_tokens("#define A 1 // one\n\n  int  x;\n") == "#define A 1\nint x;"
    assert cuda_tokens("#define A \\\n  1\n") == "#define A 1"
    assert cuda_tokens('f("a  b", "c  d");') == 'f( "a  b" , "c  d" );'
