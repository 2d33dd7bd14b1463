"""Pages in headless Chromium: console messages, and what a script reads on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=3000",
)
PHONE = 390
"""The width of a phone, in CSS pixels."""
TOOLS = """
const channels = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = (color) => channels(color)
  .map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
const between = (one, other) => {
  const both = [light(one), light(other)].sort((a, b) => b - a);
  return (both[0] + 0.05) / (both[1] + 0.05);
};
const contrast = (element) => {
  const style = getComputedStyle(element);
  return between(style.color, style.backgroundColor);
};
"""
"""JavaScript helpers for probes: the contrast of two colours, and of an element's text."""


def browse(path: Path, folder: Path, *options: str) -> tuple[str, list[str]]:
    """The document's title after its scripts ran, and its console messages."""
    assert CHROMIUM
    command = [CHROMIUM, *QUIET, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert found, done.stderr
    return found[1], [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def on_a_phone(text: str, probe: str, folder: Path, *, dark: bool) -> tuple[Any, list[str]]:
    """A probe's result on a page `PHONE` wide in a colour scheme, and the console's messages.

    probe: JavaScript in which `seen` is made, to be sent as JSON; all `details` are open.
    """
    # Its policy would forbid the probe; `test_report.py` tests the policy.
    opened = 'for (const part of document.querySelectorAll("details")) part.open = true;'
    script = f'{opened}{TOOLS}{probe}\nparent.postMessage(seen, "*");'
    probed = re.sub(r"<meta http-equiv[^>]*>", "", text)
    probed = probed.replace("</body>", f"<script>{script}</script></body>")
    (folder / "inner.html").write_text(probed, "utf-8")
    (folder / "outer.html").write_text(
        "<title></title><script>onmessage = (e) => document.title = JSON.stringify(e.data)</script>"
        f'<iframe src="inner.html" width="{PHONE}" height="844" style="border:0"></iframe>',
        "utf-8",
    )
    setting = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    title, console = browse(folder / "outer.html", folder, setting)
    return json.loads(title), console
