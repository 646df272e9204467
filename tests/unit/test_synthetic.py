"""The synthetic click log: reproducible by (seed, row), distributed as it says, with the teacher it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from loka.errors import UnknownNameError, UsageError
from loka.recsys.batch import Batch
from loka.recsys.data.synthetic import SyntheticSource
from loka.recsys.data.synthetic_columns import CLUSTERS, DENSE, FIELDS
from loka.recsys.data.synthetic_teacher import PERIODS, RANK, SHARES, Teacher
from loka.recsys.source import Source, Split

# The first ids of each field of row 0, and the sum of place times id over the first 1000 rows, for seed 0.
GOLDEN_ROW = [
    [16405],
    [89],
    [8],
    [17],
    [1],
    [509],
    [18083],
    [201],
    [2716],
    [930],
    [],
    [],
    [13773, 33480, 4627],
]
GOLDEN_SUM = 8865370379482
GOLDEN_DENSE = [0.86089307, 5.8393064, -0.69314718, 1.0701169, 3.0071185, 5.8434076, 1.8217965, 2.5659156]
INDEX = {spec.name: i for i, spec in enumerate(FIELDS)}


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return SyntheticSource(rows=40_000, seed=7, variant="both", tasks=2)


@pytest.fixture(scope="module")
def log(source: SyntheticSource) -> Batch:
    return source.batch(torch.arange(32_000))


def same(a: Batch, b: Batch) -> bool:
    pairs = [(a.dense, b.dense), (a.ids.values, b.ids.values), (a.ids.lengths, b.ids.lengths)]
    pairs += [(a.rows, b.rows), (a.labels, b.labels)]
    return a.ids.starts == b.ids.starts and all(torch.equal(x, y) for x, y in pairs)


def row_of(batch: Batch, i: int) -> list[list[int]]:
    """The ids of one row, field by field, found without `Ids.field`."""
    out, start = [], 0
    for lengths in batch.ids.lengths.tolist():
        before = start + sum(lengths[:i])
        out.append(batch.ids.values[before : before + lengths[i]].tolist())
        start += sum(lengths)
    return out


def test_a_row_is_the_same_in_every_batch_and_every_log(source: SyntheticSource) -> None:
    together = source.batch(torch.arange(200, 264))
    longer = SyntheticSource(rows=1_000_000, seed=7, variant="both", tasks=2)
    order = torch.tensor([40, 3, 3, 63])
    shuffled = longer.batch(200 + order)
    for place, i in enumerate(order.tolist()):
        alone = source.batch(torch.tensor([200 + i]))
        assert row_of(alone, 0) == row_of(together, i) == row_of(shuffled, place)
        for batch, at in ((alone, 0), (shuffled, place)):
            # The vector width of exp and log depends on the batch.
            assert torch.allclose(batch.dense[at], together.dense[i], rtol=1e-6, atol=1e-7)
            assert torch.equal(batch.labels[at], together.labels[i])


def test_batches_cover_the_splits_in_order_and_resume() -> None:
    source: Source = SyntheticSource(rows=4_001, seed=7, tasks=2)
    seen = []
    for split, expected in ((Split.TRAIN, 3_200), (Split.VALID, 400), (Split.TEST, 401)):
        batches = list(source.batches(split, 300))
        assert [len(b) for b in batches] == [300] * (expected // 300) + [expected % 300]
        assert source.rows(split) == expected
        resumed = list(source.batches(split, 300, skip=1))
        assert len(resumed) == len(batches) - 1
        assert all(same(a, b) for a, b in zip(batches[1:], resumed, strict=True))
        seen += [b.rows for b in batches]
    assert torch.equal(torch.cat(seen), torch.arange(4_001))
    assert list(source.batches(Split.TEST, 4_000, skip=5)) == []
    assert source.skipped == {}


def test_seeds_differ_and_one_seed_does_not(source: SyntheticSource) -> None:
    again, other = (SyntheticSource(rows=40_000, seed=s, variant="both", tasks=2) for s in (7, 8))
    rows = torch.arange(500)
    assert same(source.batch(rows), again.batch(rows))
    assert source.identity() == again.identity() != other.identity()
    user = [s.batch(rows).ids.field(0)[0] for s in (source, other)]
    assert float((user[0] == user[1]).double().mean()) < 0.02


def test_rows_of_generator_version_1_stay() -> None:
    """Changing what a seed means needs a new generator version: records name it."""
    source = SyntheticSource(seed=0)
    batch = source.batch(torch.arange(1_000))
    assert source.identity()["generator_version"] == 1
    assert [ids[:3] for ids in row_of(batch, 0)] == GOLDEN_ROW
    assert (batch.ids.values * torch.arange(1, batch.ids.values.numel() + 1)).sum().item() == GOLDEN_SUM


def test_the_batch_fits_its_schema(source: SyntheticSource, log: Batch) -> None:
    log.check(source.schema)
    for spec, lengths in zip(source.schema.fields, log.ids.lengths, strict=True):
        assert int(lengths.max()) <= spec.max_length
        if spec.max_length == 1:
            assert bool((lengths == 1).all())
    history = log.ids.lengths[INDEX["history"]]
    assert int(history.min()) == 0
    assert int(history.max()) == 64
    assert source.batch(torch.empty(0, dtype=torch.int64)).ids.starts == (0,) * (len(FIELDS) + 1)


def test_lengths_follow_their_law(log: Batch) -> None:
    for spec in FIELDS:
        if spec.lengths:
            most, alpha, shift = spec.lengths
            weight = [(n + shift) ** -alpha for n in range(most + 1)]
            mean = sum(n * w for n, w in enumerate(weight)) / sum(weight)
            square = sum(n * n * w for n, w in enumerate(weight)) / sum(weight)
            found = log.ids.lengths[INDEX[spec.name]].double().mean().item()
            assert found == pytest.approx(mean, abs=5 * math.sqrt((square - mean**2) / len(log)))


def test_ids_follow_zipf_and_missing_rates(log: Batch) -> None:
    for name in ("user", "device", "page"):  # fields that follow no cluster
        spec = FIELDS[INDEX[name]]
        ids = log.ids.field(INDEX[name])[0]
        n = len(log)
        missing = float((ids == 0).double().mean())
        assert missing == pytest.approx(spec.missing, abs=5 * math.sqrt(spec.missing / n) + 1e-9)
        counts = torch.bincount(ids[ids > 0], minlength=spec.cardinality).sort(descending=True).values
        weight = [(r + 1) ** -spec.alpha for r in range(spec.cardinality - 1)]
        for rank in range(3):
            p = (1 - spec.missing) * weight[rank] / sum(weight)
            assert int(counts[rank]) == pytest.approx(n * p, abs=5 * math.sqrt(n * p))


def test_items_follow_the_users_cluster(source: SyntheticSource, log: Batch) -> None:
    cluster_of = source.columns.cluster_of
    user = cluster_of["user"][log.ids.field(INDEX["user"])[0]]
    item = cluster_of["item"][log.ids.field(INDEX["item"])[0]]
    agree = float((user == item).double().mean())
    # Half are exchanged for the user's cluster; the others agree by chance.
    chance = sum(
        float((user == c).double().mean()) * float((item == c).double().mean()) for c in range(CLUSTERS)
    )
    assert agree == pytest.approx(0.5 + 0.5 * chance, abs=0.02)
    # Attributes are functions of their entity.
    brand = log.ids.field(INDEX["brand"])[0]
    pairs = torch.stack([log.ids.field(INDEX["item"])[0], brand]).unique(dim=1)
    assert pairs.shape[1] == pairs[0].unique().numel()


def test_dense_features_are_heavy_tailed_in_both_forms(source: SyntheticSource, log: Batch) -> None:
    log_form, raw = log.dense.double().chunk(2, dim=1)
    assert source.schema.dense[: len(DENSE)] == tuple(f"log1p_{s.name}" for s in DENSE)
    assert source.schema.dense[len(DENSE) :] == tuple(s.name for s in DENSE)
    assert torch.allclose(log_form, torch.sign(raw) * torch.log(1 + raw.abs()), rtol=1e-6, atol=1e-6)
    n = len(log)
    for i, spec in enumerate(DENSE):
        x = raw[:, i]
        assert float((x == 0).double().mean()) == pytest.approx(
            spec.zero, abs=5 * math.sqrt(spec.zero / n) + 1e-9
        )
        missing = float((x == -1).double().mean())
        assert missing == pytest.approx(spec.missing, abs=5 * math.sqrt(spec.missing / n) + 1e-9)
        logs = x[x > 0].log()
        assert float(logs.median()) == pytest.approx(spec.mu, abs=0.35)  # moved by the users' latent vectors
        assert float(x.max()) <= spec.largest
    assert float(raw[:, 4].max()) == pytest.approx(1.6e6)  # float32's nearest
    assert bool(torch.isfinite(log.dense).all())
    single = SyntheticSource(rows=100, seed=7, variant="raw").batch(torch.arange(50)).dense
    assert torch.allclose(single, log.dense[:50, len(DENSE) :], rtol=1e-6)
    first = SyntheticSource(seed=0).batch(torch.arange(1)).dense[0].tolist()
    assert first == pytest.approx(GOLDEN_DENSE, rel=1e-6)


def brute_force_logit(teacher: Teacher, source: SyntheticSource, row: int) -> float:
    """The teacher's formula for one row, by loops over fields and pairs, from the tables before fusion."""
    batch = source.batch(torch.tensor([row]))
    vectors = []
    linear = 0.0
    for table, ids in zip(teacher.tables, row_of(batch, 0), strict=True):
        mean = [sum(table[i, c].item() for i in ids) / max(len(ids), 1) for c in range(1 + RANK)]
        linear += mean[0]
        vectors.append(mean[1:])
    pairs = sum(
        sum(a * b for a, b in zip(vectors[f], vectors[g], strict=True))
        for g in range(len(vectors))
        for f in range(g)
    )
    drawn = source.columns.draw(torch.tensor([row]))
    mean, std = teacher._dense
    x = ((drawn.log[0] - mean) / std).tolist()
    u = source.columns.user_latent[row_of(batch, 0)[0][0]].tolist()
    inner, bias, out, by_user = (t.tolist() for t in teacher.mlp)
    mlp = 0.0
    for h in range(len(bias)):
        hidden = math.tanh(sum(w * v for w, v in zip(inner[h], x, strict=True)) + bias[h])
        mlp += hidden * (out[h] + sum(w * v for w, v in zip(by_user[h], u, strict=True)))
    cluster = source.columns.cluster_of["item"][row_of(batch, 0)[INDEX["item"]][0]].item()
    drift = 0.0
    for i, period in enumerate(PERIODS):
        cosine, sine = teacher.drift_weights[:, cluster, i].tolist()
        drift += math.sin(2 * math.pi * row / period) * cosine + math.cos(2 * math.pi * row / period) * sine
    parts = zip((linear, pairs, mlp, drift), teacher._means, teacher._factors, strict=True)
    return teacher.scale * sum((p - m) * f for p, m, f in parts) + teacher.intercept


def test_the_teacher_is_its_formula(source: SyntheticSource) -> None:
    rows = [0, 1, 17, 31_999, 5_000_000]
    found = source.teacher_logit(torch.tensor(rows))
    assert found.dtype == torch.float64
    for row, logit in zip(rows, found.tolist(), strict=True):
        assert logit == pytest.approx(brute_force_logit(source.teacher, source, row), abs=1e-9)


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.log() + (1 - p) * (1 - p).log())


@pytest.mark.parametrize("ctr", [0.25, 0.03, 0.999])
def test_click_rate_and_bayes_ne_are_as_asked(ctr: float) -> None:
    source = SyntheticSource(rows=2_000_000, seed=1, ctr=ctr)
    # Rows of all of the drift's slow period.
    p = torch.sigmoid(source.teacher_logit(torch.arange(20_000) * 3_355 + 5))
    assert min(float(p.mean()) / ctr, (1 - float(p.mean())) / (1 - ctr)) == pytest.approx(
        1, abs=0.05 if ctr < 0.9 else 0.2
    )
    assert source.teacher.scale > 0
    assert float(_entropy(p).mean() / _entropy(p.mean())) == pytest.approx(
        0.80, abs=0.012 if ctr < 0.9 else 0.03
    )


def test_labels_are_draws_of_the_teacher(source: SyntheticSource, log: Batch) -> None:
    for task in range(2):
        logit = source.teacher_logit(log.rows, task=("label", "conversion")[task])
        p, y = torch.sigmoid(logit), log.labels[:, task].double()
        for part in p.argsort().chunk(10):
            expected, variance = p[part].sum(), (p[part] * (1 - p[part])).sum()
            assert abs(float((y[part].sum() - expected) / variance.sqrt())) < 4
    click, conversion = log.labels.T
    assert bool((conversion <= click).all())
    assert float(conversion.sum() / click.sum()) == pytest.approx(0.2, abs=0.03)
    auc = float(binary_auroc(source.teacher_logit(log.rows), log.labels[:, 0].long()))
    assert auc == pytest.approx(0.80, abs=0.02)


def test_bayes_ne_is_what_labels_show(source: SyntheticSource, log: Batch) -> None:
    estimate = source.bayes_ne(Split.TRAIN)
    assert estimate.rows == 32_000
    p, y = torch.sigmoid(source.teacher_logit(log.rows)), log.labels[:, 0].double()
    loss = -(y * p.log() + (1 - y) * (1 - p).log())
    found = float(loss.mean() / _entropy(y.mean()))
    assert estimate.ne == pytest.approx(found, abs=4 * float(loss.std()) / math.sqrt(len(y)) / 0.56)
    # The standard error is the spread of the same estimate over disjoint parts, scaled.
    parts = torch.stack([_entropy(q).mean() / _entropy(q.mean()) for q in p.chunk(64)])
    assert estimate.standard_error == pytest.approx(float(parts.std()) / 8, rel=0.3)
    few = source.bayes_ne(Split.TRAIN, at_most=500)
    assert few.rows == 500
    assert abs(few.ne - estimate.ne) < 4 * few.standard_error


def test_shares_of_the_logit(source: SyntheticSource) -> None:
    parts, _ = source.teacher._parts(source.columns.draw(torch.arange(16_384) * 4_099))
    spread = torch.stack([p.std() * f for p, f in zip(parts, source.teacher._factors, strict=True)])
    wanted = torch.tensor(SHARES, dtype=torch.float64)
    assert torch.allclose(spread, wanted / wanted.norm(), rtol=1e-9)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="9 rows"):
        SyntheticSource(rows=9)
    with pytest.raises(UsageError, match=r"click rate of a synthetic click log is 1\.5"):
        SyntheticSource(ctr=1.5)
    with pytest.raises(UsageError, match="1 or 2 tasks, got 3"):
        SyntheticSource(tasks=3)
    with pytest.raises(UnknownNameError, match=r"unknown variant `log`[\s\S]*log1p"):
        SyntheticSource(variant="log")
    source = SyntheticSource(rows=10)
    with pytest.raises(UsageError, match="batch_size is 0"):
        next(source.batches(Split.TRAIN, 0))
    with pytest.raises(UsageError, match="skip is -1"):
        next(source.batches(Split.TRAIN, 1, skip=-1))
    with pytest.raises(UnknownNameError, match="unknown task `conversion`"):
        source.teacher_logit(torch.arange(3), task="conversion")
    with pytest.raises(UsageError, match="at_most is 1"):
        source.bayes_ne(Split.TRAIN, at_most=1)
    assert source.bayes_ne(Split.TEST).standard_error == math.inf
