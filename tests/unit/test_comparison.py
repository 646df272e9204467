from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from loka.errors import ArtifactError, UsageError
from loka.recsys.evaluation.comparison import Coverage, NoiseSource, compare
from loka.recsys.evaluation.comparison_table import comparison_table
from loka.recsys.evaluation.pair_difference import PairDifference, pair_differences
from loka.recsys.evaluation.predictions import Predictions, read_predictions, write_predictions
from loka.vocab import Pass

N = 800


def two_runs(seed: int = 0, *, weighted: bool = False, tasks: int = 1) -> tuple[Predictions, Predictions]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, tasks, generator=generator) - 1
    labels = (torch.rand(N, tasks, generator=generator) < logits.sigmoid()).float()
    other = logits + 0.05 * torch.randn(N, tasks, generator=generator)
    weights = torch.rand(N, generator=generator) + 0.5 if weighted else None
    names = ("label",) if tasks == 1 else tuple(f"t{t}" for t in range(tasks))
    rows = torch.arange(1000, 1000 + N)
    return Predictions(names, rows, logits, labels, weights), Predictions(names, rows, other, labels, weights)


def pair(
    a: Predictions | None, b: Predictions | None, seed: int | None = None, tasks: int = 1
) -> tuple[PairDifference, ...]:
    names = ("label",) if tasks == 1 else tuple(f"t{t}" for t in range(tasks))
    return pair_differences(a, b, tasks=names, seed=seed)


def text_of(comparison: object) -> str:
    console = Console(width=140, file=io.StringIO())
    with console.capture() as capture:
        console.print(comparison_table(comparison))  # type: ignore[arg-type]
    return capture.get()


@pytest.mark.parametrize("weighted", [False, True])
def test_comparison_recomputed_from_the_parquet_file(tmp_path: Path, weighted: bool) -> None:
    bf16, fp8 = two_runs(weighted=weighted)
    path = tmp_path / "predictions.parquet"
    write_predictions(path, {"bf16": bf16, "fp8": fp8})
    comparison = compare([pair(bf16, fp8)], baseline="bf16", candidate="fp8", split="test")

    table = pq.read_table(path)
    assert table.column_names == ["row", "label", "weight", "logit.bf16", "logit.fp8"]
    y = table["label"].to_numpy().astype(np.float64)
    w = table["weight"].to_numpy().astype(np.float64)
    assert bool((w == 1).all()) is not weighted
    losses, calibrations = {}, {}
    for arm in ("bf16", "fp8"):
        p = 1 / (1 + np.exp(-table[f"logit.{arm}"].to_numpy().astype(np.float64)))
        losses[arm] = -(y * np.log(p) + (1 - y) * np.log(1 - p))
        calibrations[arm] = (w * p).sum() / (w * y).sum()
    mean = {arm: (w * loss).sum() / w.sum() for arm, loss in losses.items()}
    base = (w * y).sum() / w.sum()
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base))
    relative = 100 * (mean["fp8"] - mean["bf16"]) / mean["bf16"]
    d = losses["fp8"] - losses["bf16"]
    centred = w * (d - (w * d).sum() / w.sum())
    se = np.sqrt((centred**2).sum() * N / (N - 1)) / w.sum()
    if not weighted:
        assert se == pytest.approx(d.std(ddof=1) / np.sqrt(N))

    (task,) = comparison.tasks
    assert task.ne.baseline == pytest.approx(mean["bf16"] / entropy, rel=1e-12)
    assert task.ne.candidate == pytest.approx(mean["fp8"] / entropy, rel=1e-12)
    assert task.log_loss.difference == pytest.approx(mean["fp8"] - mean["bf16"], rel=1e-9)
    assert task.calibration.difference == pytest.approx(calibrations["fp8"] - calibrations["bf16"], rel=1e-9)
    change = task.relative_ne_percent
    assert change.difference == pytest.approx(relative, rel=1e-9)
    assert change.noise is NoiseSource.ROWS
    assert change.high == pytest.approx(relative + 1.6448536 * 100 * se / mean["bf16"], rel=1e-7)
    assert task.ne.baseline is not None
    assert task.ne.candidate is not None
    assert relative == pytest.approx(100 * (task.ne.candidate / task.ne.baseline - 1), rel=1e-9)
    assert comparison.diverged == {"bf16": 0, "fp8": 0}
    assert task.rows == N


def test_several_pairs_give_students_interval() -> None:
    runs = [two_runs(seed) for seed in range(4)]
    pairs = [pair(*run, seed=seed) for seed, run in enumerate(runs)]
    comparison = compare(pairs, baseline="a", candidate="b", split="test")
    values = np.array([p[0].relative_ne_percent for p in pairs])
    change = comparison.tasks[0].relative_ne_percent
    half = 2.353363 * values.std(ddof=1) / 2
    assert change.difference == pytest.approx(values.mean())
    assert (change.low, change.high) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-5)
    assert change.noise is NoiseSource.PAIRS
    assert comparison.tasks[0].auc.low is not None
    assert [p.seed for p in comparison.tasks[0].pairs] == [0, 1, 2, 3]


def test_base_rate_of_training_moves_ne_but_not_its_relative_change() -> None:
    bf16, fp8 = two_runs()
    own = pair(bf16, fp8)[0]
    given = pair_differences(bf16, fp8, tasks=("label",), bases=[0.1])[0]
    assert given.ne != own.ne
    assert given.relative_ne_percent == own.relative_ne_percent


def test_a_diverged_run_is_counted_and_nothing_is_averaged_over_the_rest() -> None:
    runs = [two_runs(seed) for seed in range(3)]
    pairs = [pair(*runs[0]), pair(runs[1][0], None), pair(*runs[2])]
    comparison = compare(pairs, baseline="bf16", candidate="fp8", split="test")
    assert comparison.diverged == {"bf16": 0, "fp8": 1}
    task = comparison.tasks[0]
    assert task.relative_ne_percent.difference is None
    assert task.ne.baseline is not None
    assert task.ne.candidate is None
    text = text_of(comparison)
    assert "diverged 1 of 3" in text
    assert "Relative NE of the pairs that finished" in text
    both = compare([pair(None, None)], baseline="bf16", candidate="fp8", split="test")
    assert both.diverged == {"bf16": 1, "fp8": 1}
    assert "diverged 1 of 1" in text_of(both)


def test_rows_of_one_class_are_undefined_not_a_crash() -> None:
    rows, logits, labels = torch.arange(4), torch.randn(4, 1), torch.zeros(4, 1)
    run = Predictions(("label",), rows, logits, labels)
    comparison = compare([pair(run, run)], baseline="a", candidate="b", split="valid")
    plain = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert plain["tasks"][0]["ne"]["baseline"] is None
    assert plain["tasks"][0]["log_loss"]["difference"] == 0.0
    assert "undefined" in text_of(comparison)
    empty = Predictions(("label",), rows[:0], logits[:0], labels[:0])
    assert compare([pair(empty, empty)], baseline="a", candidate="b", split="valid").tasks[0].rows == 0


def test_plain_values_flat_metrics_and_table() -> None:
    bf16, fp8 = two_runs(tasks=2)
    comparison = compare([pair(bf16, fp8, tasks=2)], baseline="bf16", candidate="fp8", split="test")
    comparison = dataclasses.replace(
        comparison,
        coverage=(Coverage(Pass.FWD, 10, 4, 1000, 250), Coverage(Pass.DGRAD, 10, 0, 0, 0)),
        steps_per_s={"bf16": 10.0, "fp8": 12.5},
        noise="paired sd of relative NE 0.03 % on this data",
        notes=("The plan is by accuracy only.",),
    )
    plain = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert [t["task"] for t in plain["tasks"]] == ["t0", "t1"]
    assert plain["coverage"][0] == {
        "gemm_pass": "fwd",
        "sites": 10,
        "sites_fp8": 4,
        "gemm_flops": 1000,
        "gemm_flops_fp8": 250,
    }
    flat = comparison.flat_metrics()
    assert flat["ne.t0.bf16"] == comparison.tasks[0].ne.baseline
    assert flat["relative_ne_percent.t1"] == comparison.tasks[1].relative_ne_percent.difference
    assert (flat["fp8_flops_share.fwd"], flat["fp8_flops_share.dgrad"]) == (0.25, 0.0)
    assert all(isinstance(v, float) and math.isfinite(v) for v in flat.values())
    text = text_of(comparison)
    for piece in (
        "t1: NE",
        "4 of 10",
        "25.0 %",
        "x 1.250",
        "Known noise: paired sd",
        "one pair",
        "accuracy only",
    ):
        assert piece in text
    broken = dataclasses.replace(comparison, steps_per_s={"bf16": math.inf})
    assert broken.to_dict()["steps_per_s"] == {"bf16": None}


def test_runs_about_different_rows_are_not_compared() -> None:
    bf16, fp8 = two_runs()
    shifted = dataclasses.replace(fp8, rows=fp8.rows + 1)
    with pytest.raises(UsageError, match="predict different rows"):
        pair(bf16, shifted)
    with pytest.raises(UsageError, match="different rows"):
        pair(bf16, dataclasses.replace(fp8, weights=torch.ones(N)))
    with pytest.raises(UsageError, match="no pairs"):
        compare([], baseline="a", candidate="b", split="test")
    with pytest.raises(UsageError, match="level"):
        compare([pair(bf16, fp8)], baseline="a", candidate="b", split="test", level=1.0)


@pytest.mark.parametrize(("weighted", "tasks"), [(False, 1), (True, 2)])
def test_predictions_come_back_exactly(tmp_path: Path, weighted: bool, tasks: int) -> None:
    arms = dict(zip(("bf16", "fp8.rowwise"), two_runs(weighted=weighted, tasks=tasks), strict=True))
    path = tmp_path / "predictions.parquet"
    write_predictions(path, arms)
    write_predictions(path, arms)
    assert [p.name for p in tmp_path.iterdir()] == ["predictions.parquet"]
    back = read_predictions(path)
    assert list(back) == list(arms)
    for name, predictions in arms.items():
        assert back[name].tasks == predictions.tasks
        for field in ("rows", "logits", "labels", "weights"):
            a, b = getattr(back[name], field), getattr(predictions, field)
            assert (a is None and b is None) or torch.equal(a, b)


def test_predictions_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    bf16, fp8 = two_runs()
    path = tmp_path / "predictions.parquet"
    with pytest.raises(UsageError, match="no predictions to write"):
        write_predictions(path, {})
    with pytest.raises(UsageError, match="arms `a` and `b` predict different rows"):
        write_predictions(path, {"a": bf16, "b": dataclasses.replace(fp8, rows=fp8.rows + 1)})
    with pytest.raises(ArtifactError, match="cannot write predictions"):
        write_predictions(tmp_path / "none" / "predictions.parquet", {"a": bf16})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArtifactError, match="no predictions at"):
        read_predictions(path)
    path.write_text("row,label")
    with pytest.raises(ArtifactError, match="not a Parquet file"):
        read_predictions(path)
    import pyarrow as pa

    pq.write_table(pa.table({"row": [1]}), path)
    with pytest.raises(ArtifactError, match="holds no predictions"):
        read_predictions(path)
