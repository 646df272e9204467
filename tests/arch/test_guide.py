"""The guide's program runs from its first line to its last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from running import ROOT

import loka
from loka.recsys import Split, build_model
from loka.recsys.evaluation.metrics import log_loss_rows

GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def _run(title: str, names: dict[str, Any]) -> None:
    """Run the first snippet under a heading."""
    section = GUIDE.partition(f"## {title}\n")[2]
    code = re.search(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert code, f"the guide has no snippet under `{title}`"
    exec(compile(code.group(1), f"guide: {title}", "exec"), names)


# torch.compile loads modules of torch that still use what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "loka": loka}
    _run("Your own data", names)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(2000, 2, generator=generator)
    items = torch.randint(1, 1000, (2000,), generator=generator)
    clicks = (dense[:, 0] > 0.5).float()
    source = names["Log"](dense, items, clicks)
    for batch in source.batches(Split.VALID, 64):
        batch.check(source.schema)

    model = build_model("dcnv2", source.schema)
    before = dict(model.named_parameters())
    names |= {
        "model": model,
        "source": source,
        "loader": list(source.batches(Split.TRAIN, 8)),
        "loss_of": lambda logits, batch: log_loss_rows(logits, batch.labels).mean(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
    }
    _run("Probe in your own loop", names)
    assert names["profile"].steps_observed >= 1
    _run("What the numbers of a profile mean", names)
    assert "tower.deep.0 weight" in capsys.readouterr().out
    names["held_out"] = list(source.batches(Split.VALID, 64))
    _run("What the loss feels", names)
    assert names["profile"].loss.site
    assert " +- " in capsys.readouterr().out
    _run("Plan", names)
    assert "tower.deep.0" in capsys.readouterr().out
    _run("Apply", names)
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    _run("Save and load", names)
    assert names["plan"].sites
    names["print"] = lambda result: names.update(result=result)
    sections = GUIDE.partition("Then compare arms on it:")[2]
    exec(re.search(r"```python\n(.*?)```", sections, flags=re.DOTALL).group(1), names)
    assert names["result"].tasks[0].relative_ne_percent.difference is not None
