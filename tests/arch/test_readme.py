"""What the README shows works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from running import ROOT
from torch import nn

README = (ROOT / "README.md").read_text(encoding="utf-8")


def _snippets(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def _small_loop() -> dict[str, Any]:
    """The names that the snippet takes from the reader's own program."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = [(torch.randn(16, 32, generator=generator), torch.randn(16, 16, generator=generator))] * 310

    def train_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return {"model": model, "loader": loader, "train_step": train_step}


def test_the_public_names_are_shown_by_line_45() -> None:
    shown = "\n".join(README.splitlines()[:45])
    for name in ("Probe", "make_plan", "Requirement", "apply_plan", "revert"):
        assert f"loka.{name}(" in shown


def test_the_first_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = _small_loop()
    first, before = _snippets("python")[0], names["model"]
    exec(compile(first, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert "fwd" in said
    assert "0" in said
    assert names["model"] is before
    assert all(type(m) is nn.Linear for m in names["model"] if isinstance(m, nn.Linear)), "revert is exact"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        code = "\n".join(re.findall(r"```text\n.*?```|`[^`\n]+`", page.read_text(), flags=re.DOTALL))
        named = set(re.findall(r"(?:^|`)make ([a-z]\w*)", code, flags=re.MULTILINE))
        assert named <= targets, f"{page.name} names {named - targets}"


def test_every_file_that_is_linked_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or Path(ROOT / target).is_file(), f"{page.name}: {target}"
