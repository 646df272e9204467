"""The options of `loka probe`: what reaches Probe, and what is refused before anything is trained."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from planner_profiles import ProfileBuilder, linear
from tiny_recsys import one_thread  # noqa: F401 - used by every test of the module

from loka.artifacts import read_profile
from loka.cli.main import command_line
from loka.cli.probe import _plain

# 1,600 training rows or so: 16 steps.
PROBE = (
    "probe", "dcnv2", "--data", "synthetic?rows=2000", "--batch-size", "100", "--device", "cpu",
    "--set", "deep=16", "--set", "cross_layers=1", "-q",
)  # fmt: skip


class Curves:
    """Stands for TensorBoard's writer."""

    made: list[Curves]

    def __init__(self, *, log_dir: str) -> None:
        self.log_dir = log_dir
        self.points: list[tuple[str, float, int]] = []
        type(self).made.append(self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> list[Curves]:
    Curves.made = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Curves  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return Curves.made


def test_the_options_reach_probe_and_the_site_table_is_in_words(
    tmp_path: Path, curves: list[Curves], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    more = ("--probe-every", "4", "--live-every", "2", "--rows", "7", "--loss-rows", "100")
    assert command_line([*PROBE, *more, "--tensorboard", str(tmp_path / "tb"), "-o", str(out)]) == 0
    profile = read_profile(out / "profile.json")
    assert profile.steps_observed == profile.steps_seen // 4
    assert profile.overhead is not None
    assert (profile.overhead.every, profile.overhead.live_every) == (4, 2)
    assert 7 in profile.errors.m
    assert profile.loss.site
    assert set(profile.loss.site) <= set(profile.sites.name)
    # Full observed steps are the first and the third: steps 4 and 12.
    (written,) = curves
    assert written.log_dir == str(tmp_path / "tb")
    assert {step for _, _, step in written.points} == {4, 12}
    assert any(tag.startswith("tower.deep.0/sqnr_db/") for tag, _, _ in written.points)
    text = capsys.readouterr().out
    assert text.startswith("ceiling: ")
    parts = ("safe, not timed: ", "not judged: ", "judged by: ", "observing one step in ")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "(se " in text  # of fwd the loss was estimated
    assert "loss not estimated" in text  # of dgrad and wgrad it was not
    # A run that is over is not measured again, with other options neither.
    before = (out / "profile.json").read_bytes()
    capsys.readouterr()
    assert command_line([*PROBE, *more, "--resume", "-o", str(out)]) == 0
    assert (out / "profile.json").read_bytes() == before
    other = [*PROBE, *more[:-1], "50", "--resume", "-o", str(out)]
    assert command_line(other) == 2
    assert "loss_rows" in capsys.readouterr().err
    assert (out / "profile.json").read_bytes() == before


def test_as_json() -> None:
    profile = ProfileBuilder([linear("tower.deep.0"), linear("head", n=1)]).build()
    plain = _plain(profile, settled_at=None, skipped={"a reason": 3}, files=[Path("profile.json")])
    said = json.loads(json.dumps(plain))
    shown = [row for rows in said["quadrants"].values() for row in rows]
    assert len(shown) == 3 * len(profile.sites.name)
    assert said["ceiling"] is None
    assert said["overhead"] is None
    assert [site["nonfinite_rows"] for site in said["sites"]] == [0, 0]
    assert said["skipped"] == {"a reason": 3}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--rows", "0"), "--rows"),
        (("--live-every", "0"), "--live-every"),
        (("--loss-rows", "-1"), "--loss-rows"),
        (("--tensorboard", "run/curves"), "run/curves lies in the run's folder run"),
    ],
)
def test_what_cannot_be_is_refused_before_the_training(
    options: tuple[str, ...],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line([*PROBE, *options, "-o", "run"]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_curves_without_tensorboard_are_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = tmp_path / "run"
    assert command_line([*PROBE, "--tensorboard", str(tmp_path / "tb"), "-o", str(out)]) == 2
    assert "hint: pip install 'loka[tensorboard]'" in capsys.readouterr().err
    assert not out.exists()


def test_a_source_without_validation_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from loka.recsys.data import synthetic
    from loka.recsys.source import Split

    whole = synthetic.SyntheticSource.batches

    def without(self: Any, split: Split, batch_size: int, *, skip: int = 0) -> Any:
        return iter(()) if split is Split.VALID else whole(self, split, batch_size, skip=skip)

    monkeypatch.setattr(synthetic.SyntheticSource, "batches", without)
    assert command_line([*PROBE, "--loss-rows", "10", "-o", str(tmp_path / "run")]) == 2
    assert "no validation rows" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
