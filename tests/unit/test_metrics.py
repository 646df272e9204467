from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.errors import UsageError
from loka.recsys.evaluation.metrics import ClickSums, auc, evaluate, log_loss_rows
from loka.recsys.evaluation.predictions import Predictions
from loka.recsys.evaluation.running import RunningMetrics


def drawn(n: int, tasks: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, tasks, generator=generator) * 2 - 1
    labels = (torch.rand(n, tasks, generator=generator) < logits.sigmoid()).float()
    return logits, labels, torch.rand(n, generator=generator) + 0.1


def direct(z: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[float, float, float]:
    """Log loss, NE and calibration straight from their definitions on probabilities."""
    p = np.clip(1 / (1 + np.exp(-z.astype(np.float64))), 1e-12, 1 - 1e-12)
    y, w = y.astype(np.float64), w.astype(np.float64)
    loss = -(w * (y * np.log2(p) + (1 - y) * np.log2(1 - p))).sum() / w.sum()
    base = (w * y).sum() / w.sum()
    entropy = -(base * np.log2(base) + (1 - base) * np.log2(1 - base))
    return loss * np.log(2), loss / entropy, (w * p).sum() / (w * y).sum()


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_equal_their_definitions(weighted: bool) -> None:
    logits, labels, weights = drawn(5000, tasks=2)
    sums = ClickSums.of(logits, labels, weights if weighted else None)
    for t in range(2):
        w = weights.numpy() if weighted else np.ones(5000)
        loss, ne, calibration = direct(logits[:, t].numpy(), labels[:, t].numpy(), w)
        assert sums.log_loss()[t] == pytest.approx(loss, rel=1e-12)
        assert sums.normalized_entropy()[t] == pytest.approx(ne, rel=1e-12)
        assert sums.calibration()[t] == pytest.approx(calibration, rel=1e-12)


def test_ne_of_the_base_rate_is_one() -> None:
    labels = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    logits = torch.full((4, 1), math.log(1 / 3), dtype=torch.float64)
    assert ClickSums.of(logits, labels).normalized_entropy()[0] == pytest.approx(1.0, abs=1e-14)


def test_ne_with_the_base_rate_of_training() -> None:
    logits, labels, _ = drawn(400)
    sums = ClickSums.of(logits, labels)
    entropy = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    loss = sums.log_loss()[0]
    assert loss is not None
    assert sums.normalized_entropy(base=0.2)[0] == pytest.approx(loss / entropy, rel=1e-13)
    with pytest.raises(UsageError, match=r"got 1\.0"):
        sums.normalized_entropy(base=1.0)


def test_probabilities_are_clamped_at_1e_12() -> None:
    wrong = log_loss_rows(torch.tensor([200.0, -200.0, math.inf]), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.allclose(wrong, torch.full((3,), -math.log(1e-12), dtype=torch.float64), rtol=1e-13, atol=0)
    right = log_loss_rows(torch.tensor([200.0]), torch.tensor([1.0]))
    assert float(right) == pytest.approx(1e-12, rel=1e-9)


def test_soft_labels() -> None:
    z, y = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.25])
    p = 1 / (1 + math.exp(-0.3))
    expected = -(0.25 * math.log(p) + 0.75 * math.log(1 - p))
    assert float(log_loss_rows(z, y)) == pytest.approx(expected, rel=1e-14)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_merging_parts_is_the_whole(sizes: list[int]) -> None:
    logits, labels, weights = drawn(sum(sizes), tasks=2, seed=3)
    whole = ClickSums.of(logits, labels, weights)
    merged = ClickSums.zeros(2)
    for start, stop in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        merged = merged + ClickSums.of(logits[start:stop], labels[start:stop], weights[start:stop])
    assert torch.allclose(merged.sums, whole.sums, rtol=1e-13, atol=1e-13)


def test_one_class_has_no_ne_and_nothing_crashes() -> None:
    logits = torch.tensor([[0.5], [-1.0]])
    nothing = ClickSums.zeros(1)
    assert (nothing.normalized_entropy(), nothing.log_loss(), nothing.calibration()) == (
        [None],
        [None],
        [None],
    )
    for label in (0.0, 1.0):
        sums = ClickSums.of(logits, torch.full((2, 1), label))
        assert sums.normalized_entropy() == [None]
        assert sums.log_loss()[0] is not None
        assert auc(logits[:, 0], torch.full((2,), label)) is None
    assert ClickSums.of(logits, torch.zeros(2, 1)).calibration() == [None]
    nan = ClickSums.of(torch.full((2, 1), math.nan), torch.tensor([[0.0], [1.0]]))
    assert (nan.normalized_entropy(), nan.calibration()) == ([None], [None])


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="must both be"):
        ClickSums.of(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(UsageError, match=r"weights \(2,\) do not fit 3 rows"):
        ClickSums.of(torch.zeros(3, 1), torch.zeros(3, 1), torch.ones(2))


def brute_force_auc(z: list[float], y: list[float]) -> float:
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a, la in zip(z, y, strict=True)
        if la
        for b, lb in zip(z, y, strict=True)
        if not lb
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("scale", [0.5, 3.0, 1000.0])
def test_auc_counts_pairs_and_ties(scale: float) -> None:
    logits, labels, _ = drawn(300, seed=5)
    z, y = (logits[:, 0] * scale).round(), labels[:, 0]  # rounding makes ties; 1000 saturates a sigmoid
    assert auc(z, y) == pytest.approx(brute_force_auc(z.tolist(), y.tolist()), abs=1e-6)


def test_auc_leaves_out_rows_of_weight_zero_and_refuses_soft_labels() -> None:
    z, y = torch.tensor([3.0, 1.0, 2.0, 9.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert auc(z, y) == pytest.approx(0.5)
    assert auc(z, y, torch.tensor([1.0, 2.0, 0.5, 0.0])) == pytest.approx(1.0)
    assert auc(z, torch.tensor([0.5, 0.0, 1.0, 0.0])) is None
    assert auc(torch.tensor([math.nan, 0.0, 1.0, 2.0]), y) is None


def test_evaluate_every_task() -> None:
    logits, labels, weights = drawn(200, tasks=2)
    predictions = Predictions(("click", "buy"), torch.arange(200), logits, labels, weights)
    metrics = evaluate(predictions)
    assert list(metrics) == ["click", "buy"]
    loss, ne, calibration = direct(logits[:, 1].numpy(), labels[:, 1].numpy(), weights.numpy())
    buy = metrics["buy"]
    assert (buy.rows, buy.log_loss, buy.ne) == (200, pytest.approx(loss), pytest.approx(ne))
    assert buy.calibration == pytest.approx(calibration)
    assert buy.auc == pytest.approx(brute_force_auc(logits[:, 1].tolist(), labels[:, 1].tolist()), abs=1e-6)
    with pytest.raises(UsageError, match="1 base rates for 2 tasks"):
        evaluate(predictions, bases=[0.1])


def test_running_metrics_cover_everything_and_the_window() -> None:
    logits, labels, weights = drawn(100, seed=9)
    running = RunningMetrics(1, window=3)
    for start in range(0, 100, 10):
        part = slice(start, start + 10)
        running.update(logits[part], labels[part], weights[part])
    assert torch.allclose(running.total.sums, ClickSums.of(logits, labels, weights).sums, rtol=1e-13)
    last = ClickSums.of(logits[70:], labels[70:], weights[70:])
    assert running.window_ne() == pytest.approx(last.normalized_entropy()[0], rel=1e-12)
    copy = RunningMetrics(1, window=3)
    copy.load_state_dict(running.state_dict())
    for metrics in (running, copy):
        metrics.update(logits[:10], labels[:10])
    assert all(torch.equal(v, copy.state_dict()[k]) for k, v in running.state_dict().items())
    with pytest.raises(UsageError, match="do not fit"):
        RunningMetrics(1, window=4).load_state_dict(running.state_dict())
    assert RunningMetrics(1).window_ne() is None
