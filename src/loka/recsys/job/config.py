"""What the main job is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loka.errors import UsageError
from loka.recsys.source import OnBadRow
from loka.recsys.training.config import TrainConfig
from loka.vocab import Requirement

__all__ = ["JobConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """One main job.

    Attributes:
        model: Name of a reference model.
        data: A source, as `open_source` takes it.
        preset: Size of the model.
        overrides: Values of the model's configuration to replace.
        train: Settings of every run; its seed is the first pair's.
        requirement: What the plan must keep.
        seeds: Number of pairs.
        probe_every: Observe each such step; None takes 100, or less where the run is too short for 10.
        on_bad_row: What a reader does with a row that it cannot read.
        mods: Names of mods for all modules of the model.

    Raises:
        UsageError: for fewer than one pair.
    """

    model: str
    data: str
    preset: str = "tiny"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    train: TrainConfig = field(default_factory=TrainConfig)
    requirement: Requirement = field(default_factory=Requirement)
    seeds: int = 1
    probe_every: int | None = None
    on_bad_row: OnBadRow = OnBadRow.ERROR
    mods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UsageError(f"seeds must be at least 1, got {self.seeds}")
        if self.probe_every is not None and self.probe_every < 1:
            raise UsageError(f"probe_every must be at least 1, got {self.probe_every}")

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of the pairs."""
        return tuple(range(self.train.seed, self.train.seed + self.seeds))

    def observe_every(self, rows: int | None) -> int:
        """Steps between observed ones, given the training rows where known."""
        if self.probe_every is not None:
            return self.probe_every
        total = self.train.rows_total(rows)
        if total is None:
            return 100
        # Not every step: where its time goes is measured on one that is not observed.
        return max(2, min(100, total // self.train.batch_size // 10))

    def identity(self) -> dict[str, Any]:
        """What a resumed job must share with the one that it goes on from, as plain values."""
        # Left out where there are none: a run from before there were any can be resumed.
        mods = {"mods": list(self.mods)} if self.mods else {}
        return mods | {
            "model": self.model,
            "preset": self.preset,
            "overrides": dict(self.overrides),
            "data": self.data,
            "train": self.train.identity(),
            "requirement": _plain(self.requirement),
            "seeds": self.seeds,
            "probe_every": self.probe_every,
            "on_bad_row": str(self.on_bad_row),
        }


def _plain(requirement: Requirement) -> dict[str, Any]:
    names = ("min_sqnr_db", "max_row_error_p99", "max_loss_increase", "min_speedup", "otherwise")
    plain: dict[str, Any] = {name: getattr(requirement, name) for name in names}
    plain["allow"], plain["deny"] = list(requirement.allow), list(requirement.deny)
    plain["pin"] = dict(requirement.pin)
    return plain
