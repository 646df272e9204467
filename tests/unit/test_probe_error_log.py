"""The log of errors against the plain formulas over all rows, bounded and restartable."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch

from loka.errors import UsageError
from loka.kernels import KERNELS, device_of
from loka.numerics.intervals import mean_interval
from loka.probe.error_log import ErrorLog
from loka.probe.trial import ERROR_FIELDS, Trial, trials_of
from loka.vocab import Site


def one_trial() -> Trial:
    return trials_of(Site("s", "linear", 16, 32, True, 8), device_of("cpu"))[0]


def rows_of(count: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(count, 9, generator=generator, dtype=torch.float64) + 0.1
    rows[:, 1] *= 1e-3
    return rows.tolist()


def log_of(rows: list[list[float]], trial: Trial, log: ErrorLog | None = None) -> ErrorLog:
    log = log or ErrorLog()
    for row in rows:
        log.add("s", [trial], torch.tensor([row], dtype=torch.float64))
        log.collect()
    return log


def test_means_maximum_and_interval_are_those_of_all_rows() -> None:
    rows = rows_of(40)
    table = log_of(rows, one_trial()).table()
    levels = [10 * math.log10(row[0] / row[1]) for row in rows]
    want = mean_interval(levels)
    assert table.observations == [40]
    assert table.sqnr_db == pytest.approx([want.mean], rel=1e-12)
    assert table.sqnr_db_low == pytest.approx([want.low], rel=1e-12)
    assert table.sqnr_db_high == pytest.approx([want.high], rel=1e-12)
    assert table.row_max == [max(row[4] for row in rows)]
    assert (table.kernel, table.m, table.source) == ([one_trial().kernel.name], [0], ["live"])
    columns = {name: [row[i] for row in rows] for i, name in enumerate(ERROR_FIELDS)}
    columns["rel_err"] = [math.sqrt(row[1] / row[0]) for row in rows]
    for column in ("rel_err", "row_p50", "row_p99", "bias", "mere", "underflow", "saturation"):
        interval = mean_interval(columns[column])
        assert getattr(table, column) == pytest.approx([statistics.fmean(columns[column])], rel=1e-12)
        half = getattr(table, f"{column}_half")
        assert half == pytest.approx([interval.high - interval.mean], rel=1e-9)
    worst = mean_interval(columns["row_max"])
    assert table.row_max_half == pytest.approx([worst.high - worst.mean], rel=1e-9)


def test_logs_of_two_ranks_merge_into_the_log_of_all_rows() -> None:
    rows, trial = rows_of(17), one_trial()
    whole, merged = log_of(rows, trial).table(), ErrorLog()
    for part in (rows[:5], rows[5:6], rows[6:]):
        merged.merge(log_of(part, trial).state())
    got = merged.table()
    assert got.observations == [17]
    for name in whole.__struct_fields__:
        want, found = getattr(whole, name), getattr(got, name)
        assert found == (pytest.approx(want, rel=1e-9) if isinstance(want[0], float) else want), name


def test_errors_of_kernels_and_of_m_are_kept_apart() -> None:
    row, trial, log = rows_of(1)[0], one_trial(), ErrorLog()
    values = torch.tensor([row], dtype=torch.float64)
    log.add("s", [trial], values)
    log.add("s", [trial], values, source="sampled", m=512)
    log.add("s", [trial], values, source="sampled", m=1024)
    other = dataclasses.replace(trial, kernel=KERNELS["torch.rowwise"])
    log.add("s", [other], values, source="sampled", m=512)
    log.collect()
    table = log.table()
    assert table.observations == [1, 1, 1, 1]
    assert sorted(zip(table.kernel, table.source, table.m, strict=True)) == sorted(
        [(trial.kernel.name, "live", 0), (trial.kernel.name, "sampled", 512),
         (trial.kernel.name, "sampled", 1024), ("torch.rowwise", "sampled", 512)]
    )  # fmt: skip
    log.drop("sampled")
    assert log.table().source == ["live"]


def test_the_state_of_another_version_is_refused_in_one_sentence() -> None:
    with pytest.raises(UsageError, match="whose parts are not 8"):
        ErrorLog().load({"s\tfwd\ta\tb\texact\tlive": torch.zeros(10)})


def test_size_does_not_grow_and_a_resumed_log_goes_on_exactly() -> None:
    rows, trial = rows_of(30), one_trial()
    whole = log_of(rows, trial)
    first = log_of(rows[:11], trial)
    resumed = ErrorLog()
    resumed.load(first.state())
    log_of(rows[11:], trial, resumed)
    assert {k: v.numel() for k, v in whole.state().items()} == {
        k: v.numel() for k, v in first.state().items()
    }
    for key, tensor in whole.state().items():
        assert torch.equal(tensor, resumed.state()[key])


@pytest.mark.parametrize("order", [1, -1])
def test_ruined_rows_stay_visible_whatever_their_order(order: int) -> None:
    good, nan, plus, minus = rows_of(4)
    nan[4] = math.nan
    plus[5], minus[5] = math.inf, -math.inf
    nan[3] = math.inf
    table = log_of([good, nan, plus, minus][::order], one_trial()).table()
    assert table.row_max == [1e30]
    assert table.row_p99 == [1e30]
    assert abs(table.bias[0]) == 1e30
    assert table.observations == [4]


def test_observations_without_a_finite_signal_are_left_out() -> None:
    good, bad = rows_of(2)
    bad[0] = math.nan
    assert log_of([good, bad], one_trial()).table().observations == [1]


class Copy:
    """Stands for the event of a copy to the host."""

    def __init__(self, *, arrived: bool) -> None:
        self.arrived, self.waited = arrived, 0

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.waited += not self.arrived
        self.arrived = True


def test_what_has_not_arrived_is_left_where_nobody_may_wait() -> None:
    rows, trial = rows_of(4), one_trial()
    log, copies = (
        ErrorLog(),
        [Copy(arrived=True), Copy(arrived=False), Copy(arrived=True), Copy(arrived=False)],
    )
    for row, copy in zip(rows, copies, strict=True):
        log.add("s", [trial], torch.tensor([row], dtype=torch.float64))
        log._pending[-1].copied = copy  # type: ignore[assignment]
    assert log.collect(wait=False) == 1
    assert (log.table().observations, log.pending) == ([1], 3)
    copies[1].arrived = True
    assert log.collect(wait=False) == 2
    assert [copy.waited for copy in copies] == [0, 0, 0, 0]
    assert log.collect() == 1
    assert [copy.waited for copy in copies] == [0, 0, 0, 1]
    assert (log.table(), log.pending) == (log_of(rows, trial).table(), 0)
