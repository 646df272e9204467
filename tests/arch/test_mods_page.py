"""The programs on the page about mods run, one after the other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from running import ROOT

from loka.sites.mods import mods_of


def test_the_mods_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "mods.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(programs) == 2
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, "mods.md", "exec"), names)
    assert mods_of(names["model"]) == ("block_norm.256", "hard_swish", "no_bias")
    assert [layer.bias is None for layer in names["model"] if hasattr(layer, "bias")] == [True, False]
    assert [layer.bias is None for layer in names["other"] if hasattr(layer, "bias")] == [True, False]
    assert "(100, 100, 100)" in capsys.readouterr().out
