"""Moments, the history of the amax and drift, against direct computation in FP64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.errors import UsageError
from loka.numerics import (
    HISTORY_STEPS,
    WINDOW_STEPS,
    AmaxHistory,
    BatchStatistics,
    Moments,
    OperandStatistics,
    statistics_bytes,
    total_variation,
)

COUNTERS = ("count", "zeros", "negatives", "nonfinite_rows", "exponents", "row_exponents")


def data(rows: int, features: int, seed: int, *, bad: bool = True) -> Tensor:
    """Heavy-tailed rows of very different sizes, with zeros, negative zeros and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    x *= torch.exp2(torch.randint(-60, 30, (rows, 1), generator=generator).float())
    x += torch.randint(0, 3, (features,), generator=generator) * 100.0
    x[torch.rand(rows, features, generator=generator) < 0.2] = 0.0
    x[torch.rand(rows, features, generator=generator) < 0.1] = -0.0
    if bad:
        for row in range(0, rows, 5):
            x[row, row % features] = (torch.nan, torch.inf, -torch.inf)[row % 3]
    return x


def direct(x: Tensor) -> dict[str, Tensor]:
    """What the attributes of Moments say, row by row and element by element, in Python's floats."""
    rows = [[float(v) for v in row] for row in x.double().tolist()]
    good = [row for row in rows if all(math.isfinite(v) for v in row)]
    exponents, row_exponents = [0] * 64, [0] * 64

    def place(v: float) -> int:
        return min(63, max(0, math.frexp(abs(v))[1] - 1 + 48))

    for row in good:
        for v in row:
            exponents[place(v)] += v != 0
        row_exponents[place(max(abs(v) for v in row))] += any(v != 0 for v in row)
    columns = list(zip(*good, strict=True)) or [()] * x.shape[1]
    means = [math.fsum(c) / len(c) if c else 0.0 for c in columns]
    return {
        "count": torch.tensor(len(good)),
        "mean": torch.tensor(means, dtype=torch.float64),
        "m2": torch.tensor(
            [math.fsum((v - m) ** 2 for v in c) for c, m in zip(columns, means, strict=True)],
            dtype=torch.float64,
        ),
        "amax": torch.tensor([max((abs(v) for v in c), default=0.0) for c in columns]),
        "zeros": torch.tensor(sum(v == 0 for row in good for v in row)),
        "negatives": torch.tensor(sum(v < 0 for row in good for v in row)),
        "nonfinite_rows": torch.tensor(len(rows) - len(good)),
        "exponents": torch.tensor(exponents),
        "row_exponents": torch.tensor(row_exponents),
    }


def check(found: Moments, wanted: dict[str, Tensor]) -> None:
    for name, tensor in found.tensors().items():
        assert tensor.shape == wanted[name].shape, name
        assert tensor.dtype is wanted[name].dtype, name
        if name == "mean":
            largest = wanted["amax"].double()
            assert ((tensor - wanted[name]).abs() <= 1e-13 * largest).all(), name
        elif name == "m2":
            largest = wanted["amax"].double().square() * max(1, int(wanted["count"]))
            assert ((tensor - wanted[name]).abs() <= 1e-12 * largest).all(), name
        else:
            assert torch.equal(tensor, wanted[name]), name


@given(rows=st.integers(0, 40), features=st.integers(1, 7), seed=st.integers(0, 10**6), cut=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_merged_statistics_equal_those_of_all_rows(rows: int, features: int, seed: int, cut: float) -> None:
    x = data(rows, features, seed)
    split = round(rows * cut)
    check(Moments.of(x), direct(x))
    check(Moments.of(x[:split]).merge(Moments.of(x[split:])), direct(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_statistics_of_a_dtype_are_those_of_its_numbers(dtype: torch.dtype) -> None:
    x = data(30, 5, 1, bad=dtype is not torch.float8_e4m3fn).clamp(-400, 400).to(dtype)
    check(Moments.of(x), direct(x.float()))
    check(Moments.of(x.float().round().clamp(-99, 99).nan_to_num().int()), direct(
        x.float().round().clamp(-99, 99).nan_to_num()
    ))  # fmt: skip


def test_nothing_and_no_features() -> None:
    for shape in ((0, 3), (4, 0)):
        moments = Moments.of(torch.zeros(shape))
        assert moments.count.item() == shape[0]
        assert moments.mean.shape == (shape[1],)
    only_bad = Moments.of(torch.full((3, 2), torch.nan))
    assert (only_bad.count.item(), only_bad.nonfinite_rows.item()) == (0, 3)
    assert torch.equal(only_bad.mean, torch.zeros(2, dtype=torch.float64))
    with pytest.raises(UsageError, match="takes \\[rows, features\\], got shape \\(3,\\)"):
        Moments.of(torch.zeros(3))
    with pytest.raises(UsageError, match="moments of 2 and of 3 features"):
        Moments.empty(2).merge(Moments.empty(3))


def history_of(amaxes: dict[int, float]) -> AmaxHistory:
    history = AmaxHistory.empty()
    for step, amax in amaxes.items():
        history = history.with_amax(step, torch.tensor(amax))
    return history


@given(
    ours=st.dictionaries(st.integers(0, 150), st.floats(0, 100, width=32), max_size=90),
    theirs=st.dictionaries(st.integers(0, 150), st.floats(0, 100, width=32), max_size=90),
)
@settings(max_examples=40, deadline=None)
def test_histories_merge_to_the_newest_steps_of_both(
    ours: dict[int, float], theirs: dict[int, float]
) -> None:
    """In any order of steps, and several amaxes of one step."""
    both = {s: max(ours.get(s, 0.0), theirs.get(s, 0.0)) for s in {*ours, *theirs}}
    merged = history_of(ours).merge(history_of(theirs))
    newest = sorted(both)[-HISTORY_STEPS:]
    assert merged.steps == tuple(newest)
    assert merged.values().tolist() == pytest.approx([both[s] for s in newest])
    again = AmaxHistory.from_tensors(merged.tensors())
    assert (again.steps, again.amax.tolist()) == (merged.steps, merged.amax.tolist())


def test_drift_compares_a_window_with_the_one_before() -> None:
    known = OperandStatistics.empty(4)
    for step in range(WINDOW_STEPS):
        known.add(torch.full((2, 4), 1.0), step=step, distributions=False)
    assert known.drift() is None
    for step in range(WINDOW_STEPS, WINDOW_STEPS + 4):
        known.add(torch.full((1, 4), 1.0), step=step, distributions=False)
        known.add(torch.full((1, 4), 8.0), step=step, distributions=False)  # a second call of the step
    drift = known.drift()
    assert drift is not None
    assert (drift.total_variation, drift.amax_octaves, drift.steps) == (0.5, 3.0, 4)
    ranks = known.merge(known).drift()
    assert ranks == drift
    resumed = OperandStatistics.from_tensors(known.tensors())
    assert resumed.drift() == drift
    for step in range(20, 20 + 2 * WINDOW_STEPS):
        for some in (known, resumed):
            some.add(torch.full((1, 4), 8.0), step=step, distributions=False)
    assert known.drift() == resumed.drift()


def test_an_older_part_of_a_run_comes_before_both_windows() -> None:
    late, early = OperandStatistics.empty(2), OperandStatistics.empty(2)
    for step in range(40):
        x = torch.full((3, 2), 2.0 ** (step // 8))
        (early if step < 11 else late).add(x, step=step, distributions=False)
    merged = late.merge(early)
    assert merged.drift() == late.drift()
    assert early.merge(late).drift() == late.drift()
    assert merged.history.steps == tuple(range(40))


def test_total_variation() -> None:
    a, b = torch.tensor([1, 3, 0]), torch.tensor([0, 6, 2])
    assert total_variation(a, b).item() == pytest.approx((0.25 + 0 + 0.25) / 2)
    assert total_variation(a, 7 * a).item() == 0
    assert total_variation(a, 0 * a).item() == 0


@given(seed=st.integers(0, 10**6), cut=st.integers(0, 24))
@settings(max_examples=25, deadline=None)
def test_operand_statistics_merge(seed: int, cut: int) -> None:
    x = data(24, 5, seed)
    whole, one, two = (OperandStatistics.empty(5, distributions=True) for _ in range(3))
    whole.add(x, step=3)
    one.add(x[:cut], step=3)
    two.add(x[cut:], step=3)
    merged = one.merge(two)
    check(merged.moments, direct(x))
    assert merged.history.steps == whole.history.steps
    assert torch.equal(merged.history.amax, whole.history.amax)
    assert torch.equal(merged.window.total, whole.window.total)
    assert merged.covariance is not None
    assert whole.covariance is not None
    assert merged.covariance.count.item() == whole.covariance.count.item() == merged.moments.count.item()
    assert merged.marginals is not None
    assert whole.marginals is not None
    assert torch.equal(merged.marginals.counts, whole.marginals.counts)


def test_only_the_given_rows_reach_the_distributions() -> None:
    x = data(30, 4, 0, bad=False)
    known = OperandStatistics.empty(4)
    known.add(x, torch.tensor([1, 4, 7]))
    assert known.moments.count.item() == 30
    assert known.covariance is not None
    assert known.covariance.count.item() == 3
    wanted = x[[1, 4, 7]].double().mean(dim=0)
    assert torch.allclose(known.covariance.mean, wanted, rtol=1e-6, atol=1e-6 * x.abs().max().item())


def test_a_weight_keeps_the_moments_of_the_last_step_and_its_history() -> None:
    known = OperandStatistics.empty(2)
    for step in range(3):
        known.take(BatchStatistics.of(torch.full((5, 2), step + 1.0)), step=step, replaces=True)
    assert known.moments.count.item() == 5
    assert known.moments.amax.tolist() == [3.0, 3.0]
    assert known.history.values().tolist() == [1.0, 2.0, 3.0]


def test_bytes_are_known_before_the_first_step() -> None:
    shapes = [(3, 5), (2100, 16)]
    held = 0
    for n, k in shapes:
        for features, distributions in ((k, True), (k, False), (n, True)):
            known = OperandStatistics.empty(features)
            known.add(torch.randn(4, features), distributions=distributions)
            held += known.nbytes
    assert statistics_bytes(shapes) == held


def test_tensors_that_are_no_statistics() -> None:
    tensors = OperandStatistics.empty(3, distributions=True).tensors()
    again = OperandStatistics.from_tensors(tensors)
    assert again.tensors().keys() == tensors.keys()
    with pytest.raises(UsageError, match="`other` is no part"):
        OperandStatistics.from_tensors({**tensors, "other.x": torch.zeros(1)})
    del tensors["moments.m2"]
    with pytest.raises(UsageError, match="not an operand's statistics"):
        OperandStatistics.from_tensors(tensors)
