"""The listing of backends survives every plugin, whatever it does as it is imported."""

from __future__ import annotations

import json
from pathlib import Path

from support import output_of

PLUGINS = {
    "aborts": "import os\nos.abort()\n",
    "exits": "raise SystemExit(3)\n",
    "hangs": "import time\ntime.sleep(600)\n",
    "leaves": "import os\nprint('bye', flush=True)\nos._exit(0)\n",
    "works": "print('hello')\nfrom r18_numpy import Backend\n",
}
CODE = """
import json
from r18.runtime import listing

ours = listing.installed
among = {names}
listing.installed = lambda: {{name: p for name, p in ours().items() if name in among}}
found = listing.entries({seconds})
print(json.dumps([[e.line.name, e.line.provider, e.line.cause, e.precisions] for e in found]))
among -= {{"hangs"}}
print(json.dumps([[line.name, line.cause] for line in listing.lines({seconds})]))
"""
SECONDS = 8
"""Seconds, more than an import takes on a busy machine."""


def plugins(folder: Path) -> None:
    """Install the plugins in a folder."""
    info = folder / "plugins-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.2\n")
    points = "\n".join(f"{name} = {name}_plugin:Backend" for name in PLUGINS)
    (info / "entry_points.txt").write_text(f"[r18.backends]\n{points}\n")
    for name, code in PLUGINS.items():
        (folder / f"{name}_plugin.py").write_text(code)


def test_a_plugin_that_ends_its_process_costs_one_line(tmp_path: Path) -> None:
    """A plugin that ends its process or hangs costs one line, and none writes to our stdout."""
    plugins(tmp_path)
    code = CODE.format(names=set(PLUGINS), seconds=SECONDS)
    listed, *_, probed_here = output_of(code, path=[tmp_path]).splitlines()
    found = json.loads(listed)
    when = "when it was imported or probed"
    assert found == [
        ["aborts", "plugins 1.2", f"its process died of SIGABRT {when}", []],
        ["exits", "plugins 1.2", "SystemExit: 3, in exits_plugin.py:1", []],
        ["hangs", "plugins 1.2", f"gave no answer for {SECONDS} s {when}", []],
        ["leaves", "plugins 1.2", f"its process exited with code 0 {when}", []],
        ["works", "plugins 1.2", "", ["fp64", "fp32", "fp8", "int8"]],
    ]
    assert json.loads(probed_here) == [
        [name, cause] for name, _, cause, _ in found if name != "hangs"
    ]


def test_auto_imports_no_plugin_while_one_of_ours_runs(tmp_path: Path) -> None:
    """`auto` imports no plugin in a command's process, which one of the above would end."""
    plugins(tmp_path)
    code = """
import sys
from r18.backend.registry import get_backend, installed
from r18_oracle.cli.verify import _backends
assert {"aborts", "exits", "hangs", "leaves", "works"} <= set(installed())
(name,) = _backends("auto")
print(name == get_backend().name, [name for name in sys.modules if name.endswith("_plugin")])
"""
    assert output_of(code, path=[tmp_path]).splitlines()[-1] == "True []"
