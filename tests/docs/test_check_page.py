"""The functions of `docs/check.md` give what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from r18_oracle.checked import How, asked_for, check
from support import ROOT

TEXT = (ROOT / "docs" / "check.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
FIRST = next(text for kind, text in BLOCKS if kind == "python")
SHOWN = {
    text.split(":")[1].split()[0]: text for kind, text in BLOCKS if text.startswith("$ r18 check")
}


@pytest.mark.parametrize("name", ["matmul", "max_pool2d"])
def test_the_page_shows_what_comes_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows the command's output, except for times and counts, which vary by machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_kernels.py").write_text(FIRST, "utf-8")
    (target,) = asked_for(str(tmp_path / "my_kernels.py") + f":{name}").targets
    result = check(target, How(network=None, isolated=False))
    output = result.text().replace(f"{tmp_path}/", "")
    shown = SHOWN[name]
    loose = re.compile(r"searched|slow|replay|a tree|^\\$")
    for line in shown.splitlines()[1:]:
        if not loose.search(line):
            assert line in output, output


def test_every_operator_is_on_the_page() -> None:
    from r18_oracle.functions.likes import LIKES

    assert all(f"`{like.title}`" in TEXT for like in LIKES.values())
