"""docs/files.md: its examples are read by the readers, and it names every field."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from artifact_examples import METRICS, plan, profile

from loka.artifacts import Environment, read_benchmark, read_plan, read_profile
from loka.artifacts.plan import Choice, Override, Plan, Predicted, Rejected, SitePlan
from loka.artifacts.profile import (
    CastTable,
    ErrorTable,
    Fingerprint,
    LossTable,
    ProductTable,
    Profile,
    SiteTable,
    StepShares,
)
from loka.artifacts.records import Benchmark
from loka.numerics import Moments
from loka.vocab import Device, OperandSpec, Requirement

DOC = (Path(__file__).parents[2] / "docs" / "files.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)


def test_examples_are_read(tmp_path: Path) -> None:
    found = {json.loads(text)["schema"]: text for text in _blocks("json")}
    assert sorted(found) == ["loka.benchmark", "loka.plan", "loka.profile"]
    for name, text in found.items():
        (tmp_path / name).write_text(text)
    assert read_profile(tmp_path / "loka.profile") == profile()
    assert read_plan(tmp_path / "loka.plan") == plan()
    assert read_benchmark(tmp_path / "loka.benchmark").metrics == METRICS


def test_example_of_statistics_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = _blocks("python")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/files.md", "exec"), {})
    assert capsys.readouterr().out.strip() == code.strip().rsplit("# ", 1)[1]


def test_every_field_is_described() -> None:
    structs = [
        Environment, Benchmark, Profile, SiteTable, ErrorTable, ProductTable, CastTable, LossTable,
        StepShares, Fingerprint, Plan, SitePlan, Choice, Rejected, Predicted, Override,
    ]  # fmt: skip
    names = {f.encode_name for s in structs for f in msgspec.structs.fields(s)}
    names |= {f.name for c in (OperandSpec, Device, Requirement, Moments) for f in fields(c)}
    text = re.sub(r"^```.*?^```$", "", DOC, flags=re.DOTALL | re.MULTILINE)
    assert sorted(name for name in names if f"`{name}`" not in text) == []
