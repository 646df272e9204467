"""Curves of an observed training: which points are written, and that each says what it should."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from planner_profiles import ProfileBuilder, add_error

from loka.artifacts.profile import ErrorTable, Overhead
from loka.errors import UsageError
from loka.numerics import OperandStatistics
from loka.probe.tensorboard import ProbeWriter
from loka.vocab import Operand, Pass


@dataclass
class Kept:
    """A writer that keeps what it is given."""

    points: dict[tuple[str, int], float] = field(default_factory=dict)
    flushed: int = 0
    closed: bool = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert (tag, global_step) not in self.points
        self.points[tag, global_step] = scalar_value

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


@dataclass
class Learning:
    """What a Probe shows."""

    statistics: dict[str, dict[Operand, OperandStatistics]] = field(default_factory=dict)
    errors: ErrorTable = field(default_factory=ErrorTable)
    overhead: Overhead | None = None


def errors(db: float, count: int, *, source: str = "live") -> ErrorTable:
    """One recipe whose mean over `count` observations is `db`."""
    profile = ProfileBuilder([], db=lambda *_: None).build()
    table = profile.errors
    add_error(profile, "tower.0", Pass.FWD, "e4m3.rowwise", "e4m3.rowwise", db - 0.5, source=source)
    table.observations[-1] = count
    return table


TAG = "fwd/e4m3.rowwise"


def test_sqnr_of_the_step_is_what_the_mean_gained() -> None:
    kept, learning = Kept(), Learning()
    writer = ProbeWriter(writer=kept)
    levels = [30.0, 27.0, 31.5, 24.0]
    for count, step in enumerate((100, 1100, 2100, 3100), 1):
        learning.errors = errors(sum(levels[:count]) / count, count)
        writer(learning, step)
    for step, level in zip((100, 1100, 2100, 3100), levels, strict=True):
        assert kept.points[f"tower.0/sqnr_db/{TAG}", step] == pytest.approx(level)
    mean = sum(levels) / 4
    assert kept.points[f"tower.0/sqnr_db_mean/{TAG}", 3100] == pytest.approx(mean)
    assert kept.points[f"tower.0/sqnr_db_low/{TAG}", 3100] == pytest.approx(mean - 0.5)
    assert kept.points[f"tower.0/sqnr_db_high/{TAG}", 3100] == pytest.approx(mean + 0.5)
    assert (f"tower.0/sqnr_db_low/{TAG}", 100) not in kept.points  # one value has no spread
    assert kept.flushed == 4


def test_a_resumed_run_gives_the_mean_until_it_has_seen_a_step() -> None:
    kept = Kept()
    writer = ProbeWriter(writer=kept)
    writer(Learning(errors=errors(30.0, 5)), 500)
    assert f"tower.0/sqnr_db/{TAG}" not in {tag for tag, _ in kept.points}
    assert kept.points[f"tower.0/sqnr_db_mean/{TAG}", 500] == pytest.approx(30.0)
    writer(Learning(errors=errors(31.0, 6)), 600)
    assert kept.points[f"tower.0/sqnr_db/{TAG}", 600] == pytest.approx(36.0)


def test_what_is_not_new_and_what_is_sampled_is_left_out() -> None:
    kept = Kept()
    writer = ProbeWriter(writer=kept)
    writer(Learning(errors=errors(30.0, 5, source="sampled")), 1)
    assert kept.points == {}
    writer(Learning(errors=errors(30.0, 5)), 2)
    before = dict(kept.points)
    writer(Learning(errors=errors(30.0, 5)), 3)
    assert kept.points == before


def test_curves_of_operands() -> None:
    kept = Kept()
    writer = ProbeWriter(writer=kept)
    x = OperandStatistics.empty(4)
    w = OperandStatistics.empty(4)
    learning = Learning(statistics={"tower.0": {Operand.INPUT: x, Operand.WEIGHT: w}})
    first = torch.tensor([[1.0, 0.0, -8.0, 2.0], [0.0, 0.0, float("nan"), 1.0]])
    x.add(first)
    w.take(_batch(torch.ones(3, 4)), step=0, replaces=True)
    writer(learning, 1)
    x.add(torch.tensor([[0.0, 0.0, 0.0, 3.0]]))
    w.take(_batch(torch.zeros(3, 4)), step=1, replaces=True)
    writer(learning, 2)
    expected = {
        ("tower.0/nonfinite_rows", 1): 1,
        ("tower.0/amax/input", 1): 8.0,
        ("tower.0/zero_share/input", 1): 1 / 4,
        ("tower.0/amax/weight", 1): 1.0,
        ("tower.0/zero_share/weight", 1): 0.0,
        ("tower.0/nonfinite_rows", 2): 1,
        ("tower.0/amax/input", 2): 3.0,
        ("tower.0/zero_share/input", 2): 3 / 4,
        ("tower.0/amax/weight", 2): 0.0,
        ("tower.0/zero_share/weight", 2): 1.0,
    }
    assert kept.points == expected


def _batch(x: torch.Tensor):  # type: ignore[no-untyped-def]
    from loka.numerics import BatchStatistics

    return BatchStatistics.of(x)


def test_drift_is_written_once_there_are_two_windows() -> None:
    kept = Kept()
    writer = ProbeWriter(writer=kept)
    x = OperandStatistics.empty(2)
    learning = Learning(statistics={"tower.0": {Operand.INPUT: x}})
    for step in range(12):
        x.add(torch.full((3, 2), 1.0 if step < 10 else 4.0))
        writer(learning, step)
    steps = [step for tag, step in kept.points if tag == "tower.0/drift/input"]
    assert steps == [10, 11]
    # Every exponent moved: the histograms have nothing in common, and amax rose by two octaves.
    assert kept.points["tower.0/drift/input", 11] == 1.0
    assert kept.points["tower.0/drift_amax_octaves/input", 11] == 2.0


def test_overhead() -> None:
    kept = Kept()
    cost = Overhead(
        plain_step_us=100.0, observed_step_us=None, full_step_us=300.0, every=50, live_every=10, percent=4.0
    )
    ProbeWriter(writer=kept)(Learning(overhead=cost), 7)
    assert kept.points == {("probe/overhead_percent", 7): 4.0, ("probe/every", 7): 50}


def test_tags_hold_only_what_tensorboard_keeps() -> None:
    kept = Kept()
    learning = Learning(errors=errors(30.0, 5))
    learning.errors.spec_b[0] = "e4m3.tensorwise"
    learning.errors.accumulation[0] = "fast"
    ProbeWriter(writer=kept)(learning, 1)
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-/_.")
    for tag, _ in kept.points:
        assert set(tag) <= allowed
        assert tag.endswith("fwd/e4m3.rowwise-e4m3.tensorwise.fast")


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"loka\[tensorboard\]"):
        ProbeWriter(tmp_path)
    ProbeWriter(writer=Kept())  # another writer needs nothing


def test_its_own_writer_is_closed_and_anothers_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Kept] = []

    def opened(*, log_dir: str) -> Kept:
        assert log_dir == str(tmp_path)
        made.append(Kept())
        return made[0]

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = opened  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with ProbeWriter(tmp_path) as writer:
        writer(Learning(errors=errors(30.0, 5)), 1)
    assert made[0].points
    assert made[0].closed
    with pytest.raises(UsageError, match="closed"):
        writer(Learning(), 2)
    theirs = Kept()
    with ProbeWriter(writer=theirs):
        pass
    assert not theirs.closed


def test_one_of_both_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="log_dir or a writer"):
        ProbeWriter()
    with pytest.raises(UsageError, match="log_dir or a writer"):
        ProbeWriter(tmp_path, writer=Kept())
