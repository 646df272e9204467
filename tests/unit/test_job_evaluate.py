"""The loss of held-out rows, as Probe asks for it."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_recsys import TinyModel, TinySource

from loka.errors import DataError, UsageError
from loka.recsys.job.config import JobConfig
from loka.recsys.job.evaluate import HeldOutBatches, loss_estimate, row_loss
from loka.recsys.source import Split
from loka.recsys.training.config import ComputeDtype, TrainConfig


def _job(**train: object) -> JobConfig:
    return JobConfig(model="dlrm", data="synthetic", train=TrainConfig(batch_size=25, **train))  # type: ignore[arg-type]


def test_the_loss_of_a_row_is_its_cross_entropy_times_its_weight() -> None:
    source = TinySource(tasks=2, weighted=True)
    model = TinyModel(tasks=2).eval()
    batch = next(source.batches(Split.VALID, 6))
    losses = row_loss(dtype=ComputeDtype.FP32, tasks=2)(model, batch)
    logits = model(batch).tolist()
    weights = batch.weight
    assert weights is not None
    for row, (z, y, w) in enumerate(zip(logits, batch.labels.tolist(), weights.tolist(), strict=True)):
        direct = [
            -math.log(1 / (1 + math.exp(-a))) if b else math.log1p(math.exp(a))
            for a, b in zip(z, y, strict=True)
        ]
        assert losses[row].item() == pytest.approx(w * sum(direct) / 2, rel=1e-5)
    assert losses.shape == (6,)


def test_gradients_flow_and_the_mode_is_left_alone() -> None:
    model = TinyModel()
    batch = next(TinySource().batches(Split.VALID, 6))
    losses = row_loss(dtype=ComputeDtype.BF16, tasks=1)(model, batch)
    losses.sum().backward()
    weight = model.tower[0].weight
    assert weight.grad is not None
    assert bool(torch.isfinite(weight.grad).all())
    assert model.training


class CountingSource(TinySource):
    """Counts how often it is read."""

    read = 0

    def batches(self, split, batch_size, *, skip=0):  # type: ignore[no-untyped-def]
        self.read += 1
        return super().batches(split, batch_size, skip=skip)


def test_batches_come_again_and_are_read_once() -> None:
    source = CountingSource(valid=60)
    batches = HeldOutBatches(source, rows=45, batch_size=25, device="cpu")
    first, second = list(batches), list(batches)
    assert [len(b) for b in first] == [25, 25]
    assert batches.rows == 50
    assert source.read == 1
    expected = list(TinySource(valid=60).batches(Split.VALID, 25))[:2]
    for a, b, c in zip(first, second, expected, strict=True):
        assert torch.equal(a.rows, c.rows)
        assert torch.equal(a.dense, b.dense)
        assert torch.equal(a.dense, c.dense)


def test_rows_are_those_of_the_split_and_no_more() -> None:
    assert HeldOutBatches(TinySource(valid=60), rows=1000, batch_size=25, device="cpu").rows == 60
    assert [len(b) for b in HeldOutBatches(TinySource(), rows=10, batch_size=25, device="cpu")] == [10]
    with pytest.raises(UsageError, match="got -3"):
        HeldOutBatches(TinySource(), rows=-3, batch_size=25, device="cpu")


def test_an_estimate_is_off_default_or_asked_for() -> None:
    source = TinySource(valid=60)
    assert loss_estimate(_job(), source, 0) is None
    by_default = loss_estimate(_job(), source, None)
    asked = loss_estimate(_job(eval_batch_size=40), source, 20)
    assert by_default is not None
    assert asked is not None
    assert by_default.batches.rows == 60
    assert [len(b) for b in asked.batches] == [20]


def test_without_validation_rows(caplog: pytest.LogCaptureFixture) -> None:
    source = TinySource(valid=0)
    with caplog.at_level("WARNING", logger="loka"):
        assert loss_estimate(_job(), source, None) is None
    assert "no validation rows" in caplog.text
    with pytest.raises(DataError, match="no validation rows"):
        loss_estimate(_job(), source, 100)
