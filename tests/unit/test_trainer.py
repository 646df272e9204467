from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from tiny_recsys import TinyModel, TinySource, one_thread  # noqa: F401 (an autouse fixture)
from torch import nn

from loka.errors import DataError, UsageError
from loka.recsys.batch import Batch
from loka.recsys.source import Split
from loka.recsys.training.config import ComputeDtype, TrainConfig
from loka.recsys.training.optimizers import build_optimizers
from loka.recsys.training.progress import Progress
from loka.recsys.training.step import DivergedError, StepInfo, click_loss
from loka.recsys.training.step_clock import StepClock
from loka.recsys.training.trainer import Trainer

CONFIG = TrainConfig(batch_size=32, dtype=ComputeDtype.FP32)


def equal_states(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


def test_loss_is_the_weighted_mean_over_rows_and_the_mean_over_tasks() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 2, generator=generator)
    labels = torch.randint(2, (6, 2), generator=generator).float()
    weights = torch.rand(6, generator=generator)
    p, y, w = logits.double().sigmoid(), labels.double(), weights.double()
    rows = -(y * p.log() + (1 - y) * (1 - p).log())
    expected = [float((w * rows[:, t]).sum() / w.sum()) for t in range(2)]
    assert float(click_loss(logits, labels, weights)) == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert float(click_loss(logits, labels)) == pytest.approx(float(rows.mean()), rel=1e-6)
    assert float(click_loss(logits, labels, torch.zeros(6))) == 0.0


def test_training_equals_a_loop_written_out() -> None:
    model, reference = TinyModel(dropout=0.0), TinyModel(dropout=0.0)
    source = TinySource(weighted=True)
    result = Trainer(model, source, CONFIG).train()
    dense = torch.optim.Adam(reference.tower.parameters(), lr=CONFIG.lr_dense)
    sparse = torch.optim.Adagrad(reference.embeddings.parameters(), lr=CONFIG.lr_sparse)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        for batch in source.batches(Split.TRAIN, 32):
            dense.zero_grad()
            sparse.zero_grad()
            assert isinstance(batch.label, torch.Tensor)
            losses = nn.functional.binary_cross_entropy_with_logits(
                reference(batch)[:, 0], batch.label, reduction="none"
            )
            ((losses * batch.weight).sum() / batch.weight.sum()).backward()
            dense.step()
            sparse.step()
    assert (result.steps, result.rows) == (11, 330)
    assert all(
        torch.allclose(v, reference.state_dict()[k], rtol=1e-5, atol=1e-6)
        for k, v in model.state_dict().items()
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", list(ComputeDtype))
def test_two_runs_with_one_seed_are_bitwise_equal(dtype: ComputeDtype, threads: int) -> None:
    torch.set_num_threads(threads)
    config = dataclasses.replace(CONFIG, dtype=dtype, epochs=2, max_rows=420 // threads)
    models = [TinyModel(), TinyModel(), TinyModel()]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        torch.manual_seed(seed * 17 + len(models))  # the caller's generator must not matter
        before = torch.get_rng_state()
        Trainer(model, TinySource(), dataclasses.replace(config, seed=seed)).train()
        assert torch.equal(torch.get_rng_state(), before)
    assert equal_states(models[0], models[1])
    assert not equal_states(models[0], models[2])  # dropout


def test_training_learns_and_the_tower_runs_in_bf16() -> None:
    model = TinyModel(dropout=0.0)
    dtypes = set()
    model.tower[0].register_forward_hook(lambda m, a, out: dtypes.add(out.dtype))
    trainer = Trainer(model, TinySource(train=2000), TrainConfig(batch_size=64, lr_dense=1e-2, epochs=3))
    before = nn.functional.binary_cross_entropy_with_logits(*logits_and_labels(trainer))
    result = trainer.train()
    after = nn.functional.binary_cross_entropy_with_logits(*logits_and_labels(trainer))
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert float(after) < 0.9 * float(before)
    ne = result.progressive.normalized_entropy()[0]
    assert ne is not None
    assert 0.6 < ne < 1.0
    assert result.speed is not None
    assert result.speed.steps == result.steps - 10
    assert result.speed.p10_step_us <= result.speed.median_step_us <= result.speed.p90_step_us


def logits_and_labels(trainer: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    predictions = trainer.evaluate(Split.TEST)
    return predictions.logits, predictions.labels


def test_evaluation_changes_nothing_and_keeps_rows_weights_and_tasks() -> None:
    model, source = TinyModel(tasks=2), TinySource(tasks=2, weighted=True)
    trainer = Trainer(model, source, dataclasses.replace(CONFIG, eval_batch_size=7))
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    predictions = trainer.evaluate(Split.TEST)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    (batch,) = source.batches(Split.TEST, 1000)
    model.eval()
    assert torch.allclose(predictions.logits, model(batch).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(predictions.rows, torch.arange(390, 480))
    assert torch.equal(predictions.labels, batch.labels)
    assert predictions.weights is not None
    assert batch.weight is not None
    assert torch.equal(predictions.weights, batch.weight)
    assert predictions.tasks == ("t0", "t1")
    none = Trainer(TinyModel(), TinySource(valid=0), CONFIG).evaluate(Split.VALID)
    assert len(none) == 0


def test_max_rows_epochs_and_hook() -> None:
    seen: list[StepInfo] = []
    config = dataclasses.replace(CONFIG, epochs=5, max_rows=400)
    result = Trainer(TinyModel(), TinySource(), config, after_step=seen.append).train()
    # 330 rows are ten batches of 32 and one of 10; then batches of the second pass up to the first >= 400.
    assert (result.steps, result.rows) == (14, 426)
    assert [s.step for s in seen] == list(range(1, 15))
    assert [len(s.batch) for s in seen[9:12]] == [32, 10, 32]
    assert seen[-1].rows == 426
    assert all(math.isfinite(float(s.loss)) for s in seen)


def test_rows_total() -> None:
    assert TrainConfig(epochs=3).rows_total(10) == 30
    assert TrainConfig(epochs=3, max_rows=12).rows_total(10) == 12
    assert TrainConfig(max_rows=12).rows_total(None) == 12
    assert TrainConfig().rows_total(None) is None


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    model = TinyModel()

    def poison(info: StepInfo) -> None:
        if info.step == 4:
            model.tower[0].weight.data.fill_(math.nan)

    with pytest.raises(DivergedError, match="step 5 is nan") as caught:
        Trainer(model, TinySource(), CONFIG, after_step=poison).train()
    assert caught.value.step == 5
    with pytest.raises(DivergedError, match="predictions of test rows"):
        Trainer(model, TinySource(), CONFIG).evaluate(Split.TEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"lr_dense": math.nan}, "lr_dense must be a finite number above 0, got nan"),
        ({"checkpoint_every_s": 0.0}, "checkpoint_every_s"),
        ({"dtype": "fp16"}, "dtype must be a ComputeDtype, got 'fp16'"),
        ({"device": "abacus"}, "unknown device `abacus`"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_settings_out_of_range(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**change)  # type: ignore[arg-type]


class Unsorted(TinyModel):
    def dense_parameters(self) -> Iterator[nn.Parameter]:
        return self.tower[0].parameters()


def test_every_parameter_has_one_optimizer_and_frozen_ones_none() -> None:
    with pytest.raises(UsageError, match=r"`tower\.3\.weight` is in neither"):
        build_optimizers(Unsorted(), CONFIG)
    with pytest.raises(UsageError, match="Linear has no sparse_parameters"):
        build_optimizers(nn.Linear(2, 2), CONFIG)
    model = TinyModel()
    frozen = model.tower[0].weight.requires_grad_(False)
    before = frozen.clone()
    Trainer(model, TinySource(), CONFIG).train()
    assert torch.equal(frozen, before)


def test_no_rows_wrong_shape_and_nothing_to_compile() -> None:
    with pytest.raises(DataError, match="`tiny` has no training rows"):
        Trainer(TinyModel(), TinySource(train=0), CONFIG).train()
    with pytest.raises(UsageError, match=r"logits \(32, 1\), expected \(32, 2\)"):
        Trainer(TinyModel(), TinySource(tasks=2), CONFIG).train()
    model = TinyModel()
    model.tower = None
    model.dense_parameters = lambda: iter(())  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="no module `tower`"):
        Trainer(model, TinySource(), dataclasses.replace(CONFIG, compile=True))


def test_rows_without_numbers_are_numbered() -> None:
    class Unnumbered(TinySource):
        def batches(self, split: Split, batch_size: int, *, skip: int = 0) -> Iterator[Batch]:
            for batch in super().batches(split, batch_size, skip=skip):
                yield Batch(batch.dense, batch.ids, batch.label, batch.weight)

    predictions = Trainer(TinyModel(), Unnumbered(), CONFIG).evaluate(Split.TEST)
    assert torch.equal(predictions.rows, torch.arange(90))


def test_the_clock_leaves_out_warm_up() -> None:
    assert StepClock(torch.device("cpu")).speed() is None
    clock = StepClock(torch.device("cpu"), warm_up=2)
    for rows in (100, 100, 7, 8, 9):
        clock.start()
        clock.stop(rows)
    speed = clock.speed()
    assert speed is not None
    assert speed.steps == 3
    assert speed.rows_per_s / speed.steps_per_s == pytest.approx(8.0)


def test_progress_says_nothing_on_stdout(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="loka")
    with Progress("train", total_rows=1000, bar=False) as progress:
        progress.update(10, lambda: 0.9)
        progress.update(500, lambda: 0.81234, last=True)
        progress.update(500, lambda: 0.81234, last=True)  # said already
    assert [r.message.split(",")[0] for r in caplog.records] == ["train: 500 of 1"]
    assert "NE 0.8123" in caplog.text
    with Progress("train", total_rows=None, bar=True, every_s=0.0) as progress:
        progress.update(10, lambda: None)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "rows/s" in captured.err
