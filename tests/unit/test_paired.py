from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_recsys import TinyModel, TinySource, one_thread  # noqa: F401 (an autouse fixture)
from torch import nn

from loka.errors import UnknownNameError, UsageError
from loka.recsys.evaluation.metrics import evaluate
from loka.recsys.evaluation.predictions import read_predictions
from loka.recsys.pairs.paired import paired
from loka.recsys.source import Split
from loka.recsys.training.config import ComputeDtype, TrainConfig
from loka.recsys.training.step import StepInfo
from loka.recsys.training.trainer import Trainer

CONFIG = TrainConfig(batch_size=32, dtype=ComputeDtype.FP32)


def unchanged(model: nn.Module) -> None:
    """The baseline."""


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("tower.0.weight").mul_(0.5)


def break_it(model: nn.Module) -> None:
    model.get_parameter("tower.0.weight").data.fill_(float("nan"))


def test_equal_arms_give_exactly_equal_runs() -> None:
    result = paired(TinyModel, TinySource(), {"a": unchanged, "b": unchanged}, [0, 1], CONFIG)
    for seed in (0, 1):
        for split in (Split.VALID, Split.TEST):
            a, b = (result.run(arm, seed).predictions[split] for arm in ("a", "b"))
            assert torch.equal(a.logits, b.logits)
    assert not torch.equal(
        result.run("a", 0).predictions[Split.TEST].logits, result.run("a", 1).predictions[Split.TEST].logits
    )
    change = result.compare().tasks[0].relative_ne_percent
    assert (change.difference, change.low, change.high) == (0.0, 0.0, 0.0)


def test_every_run_is_what_the_trainer_alone_would_give() -> None:
    result = paired(TinyModel, TinySource(), {"base": unchanged, "half": halve}, [3], CONFIG)
    for arm, change in (("base", unchanged), ("half", halve)):
        model = TinyModel(3)
        change(model)
        trainer = Trainer(model, TinySource(), dataclasses.replace(CONFIG, seed=3))
        trainer.train()
        alone = trainer.evaluate(Split.TEST)
        assert torch.equal(result.run(arm, 3).predictions[Split.TEST].logits, alone.logits)
    comparison = result.compare()
    assert (comparison.baseline, comparison.candidate, comparison.pairs) == ("base", "half", 1)
    assert comparison.tasks[0].rows == 90
    assert comparison.tasks[0].ne.difference != 0.0
    assert result.compare(split=Split.VALID).tasks[0].rows == 60
    assert set(result.steps_per_s()) == {"base", "half"}


def test_a_diverged_arm_is_a_result(tmp_path: Path) -> None:
    arms = {"base": unchanged, "broken": break_it}
    result = paired(TinyModel, TinySource(), arms, [0, 1], CONFIG)
    run = result.run("broken", 1)
    assert run.diverged == "training diverged: the loss of step 1 is nan"
    assert run.predictions == {}
    comparison = result.compare()
    assert comparison.diverged == {"base": 0, "broken": 2}
    assert comparison.tasks[0].relative_ne_percent.difference is None
    assert set(result.steps_per_s()) == {"base"}
    paths = result.write_predictions(tmp_path)
    assert [list(read_predictions(p)) for p in paths] == [["base"]] * 4


def test_predictions_are_written_for_each_seed_and_split(tmp_path: Path) -> None:
    result = paired(TinyModel, TinySource(), {"a": unchanged, "b": halve}, [0, 5], CONFIG)
    paths = result.write_predictions(tmp_path)
    assert sorted(p.name for p in paths) == [
        "predictions-test-seed-0.parquet",
        "predictions-test-seed-5.parquet",
        "predictions-valid-seed-0.parquet",
        "predictions-valid-seed-5.parquet",
    ]
    back = read_predictions(tmp_path / "predictions-test-seed-5.parquet")
    again = evaluate(back["b"])["label"].ne
    assert result.compare().tasks[0].pairs[1].candidate is not None
    assert again == result.compare().tasks[0].pairs[1].candidate.ne  # type: ignore[union-attr]


def test_a_given_model_is_left_untouched() -> None:
    model = TinyModel(2)
    result = paired(model, TinySource(), {"a": unchanged, "b": halve}, [0], CONFIG)
    assert all(torch.equal(v, TinyModel(2).state_dict()[k]) for k, v in model.state_dict().items())
    assert len(result.runs) == 2


def test_a_stopped_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    arms = {"a": unchanged, "b": halve}
    config = dataclasses.replace(CONFIG, checkpoint_every_steps=2)
    through = paired(TinyModel, TinySource(), arms, [0, 1], config)

    def crash(arm: str, seed: int, info: StepInfo) -> None:
        if (arm, seed, info.step) == ("a", 1, 5):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        paired(TinyModel, TinySource(), arms, [0, 1], config, directory=tmp_path, after_step=crash)
    steps: list[tuple[str, int, int]] = []

    def note(arm: str, seed: int, info: StepInfo) -> None:
        steps.append((arm, seed, info.step))

    resumed = paired(
        TinyModel, TinySource(), arms, [0, 1], config, directory=tmp_path, resume=True, after_step=note
    )
    assert steps[0] == ("a", 1, 5)
    assert len(steps) == 7 + 11
    for run, expected in zip(resumed.runs, through.runs, strict=True):
        assert torch.equal(run.predictions[Split.TEST].logits, expected.predictions[Split.TEST].logits)


def test_what_cannot_be_compared() -> None:
    arms = {"a": unchanged, "b": halve}
    with pytest.raises(UsageError, match="at least two arms, got 1"):
        paired(TinyModel, TinySource(), {"a": unchanged}, [0], CONFIG)
    with pytest.raises(UsageError, match=r"got \[1, 1\]"):
        paired(TinyModel, TinySource(), arms, [1, 1], CONFIG)
    with pytest.raises(UsageError, match="2 seeds would repeat one run"):
        paired(TinyModel(), TinySource(), arms, [0, 1], CONFIG)
    with pytest.raises(UsageError, match="`a/b` cannot be a file name"):
        paired(TinyModel, TinySource(), {"a/b": unchanged, "c": halve}, [0], CONFIG)
    result = paired(TinyModel, TinySource(), arms, [0], CONFIG)
    with pytest.raises(UnknownNameError, match="unknown arm `c`"):
        result.compare("c")
    with pytest.raises(UnknownNameError, match="unknown seed `9`"):
        result.run("a", 9)
